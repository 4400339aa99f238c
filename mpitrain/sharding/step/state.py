"""One sharded module: what happens around its forward and in its backward."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from mpitrain.sharding.setup.policy import MixedPrecisionPolicy
from mpitrain.sharding.step.arguments import cast, flatten, tensors_in
from mpitrain.sharding.step.context import Context, Phase
from mpitrain.sharding.unit.ranks import Ranks
from mpitrain.sharding.unit.registry import enter
from mpitrain.sharding.unit.unit import Unit


class State:
    """The units of one module and where they are in a step. `context` is set at the first forward of the outermost module."""

    def __init__(
        self,
        ranks: Ranks,
        units: list[Unit],
        policy: MixedPrecisionPolicy,
        *,
        stage: int,
        reshard_after_forward: bool,
        prefetch_bytes: int | None = None,
    ) -> None:
        self.name = ""  # within the outermost module, and this one's class, for readers; set with `context`
        self.ranks = ranks
        self.units = units
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.prefetch_bytes = prefetch_bytes  # that of the outermost module counts
        self.reduces_early = stage != 1  # as soon as this module's gradients are there, not at the end of the backward
        self.context: Context | None = None
        self.sync_gradients = True
        self.complete = (
            False  # this backward has brought all gradients of this module: see [Note: complete] in context.py
        )
        self._gathered = [unit for unit in units if not unit.storage.lasts]
        self.count_trained()
        self._counts = not self._gathered  # gradients, to know when it is complete
        self._missing = 0  # gradients that this backward has not brought yet; -1: they are not counted
        self._has_run = False  # a forward, since the last fence opened
        self._is_held = False  # full until `let_go`
        self._ran = False  # a forward whose backward may come
        self._in_graph = False  # that a backward has made: see [Note: second derivatives] in context.py
        self._was_in_graph = False  # of any backward so far
        # Of forwards whose backward may come, the nodes that `_watch_inputs` put into the graph, while those live: a module may be used
        # twice, a graph gone through twice.
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._returned: weakref.WeakSet[Any] = weakref.WeakSet()  # those of them that this backward has come to
        enter(self)

    def count_trained(self) -> None:
        """How many gradients a backward brings at most; again when parameters were thawed."""
        self._num_trained = sum(len(group.params) for unit in self.units for group in unit.gradients)

    # Around forward

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """Run the module's own forward with full parameters in place. `context` is this module's own."""
        if _in_backward():
            # Activation checkpointing recomputes: not a new forward, and what follows needs the parameters still.
            context.begin_backward()  # a reentrant one may be the first that is seen of this backward
            self._gather()
            args, kwargs = self._cast_inputs(args, kwargs)
            return self._cast_outputs(call(*args, **kwargs))
        outermost = context.phase is not Phase.FORWARD
        written = None
        try:
            if outermost:
                context.open()
                written = context.count_writes()
            self._has_run = True
            self._gather()
            args, kwargs = self._cast_inputs(args, kwargs)
            with_grad = torch.is_grad_enabled()
            self._ran = self._ran or with_grad
            if with_grad and not self._counts:
                args, kwargs = self._watch_inputs(args, kwargs)
            output = self._cast_outputs(call(*args, **kwargs))
            self._check_outputs(output)
            if with_grad and (outermost or self._gathered):
                self._watch_outputs(output, written)
            if outermost and with_grad:
                context.check_reach(output)
        except BaseException as error:
            if outermost:
                try:
                    if isinstance(error, Exception):  # and not Ctrl-C
                        context.check_reach(error)
                finally:
                    context.reset()  # no fence: the other ranks may be anywhere
            raise
        # The outermost module's backward comes first: what it holds stays gathered for it.
        self.release(keep=not self.reshard_after_forward or (outermost and with_grad), for_backward=with_grad)
        if outermost:
            context.close(before_backward=with_grad)
        return output

    def _gather(self) -> None:
        """Fill and show what does not last, or is being refreshed. Idempotent. Collective."""
        assert self.context is not None
        self.finish_refresh()
        for unit in self._gathered:
            with self.context.communicating():
                if unit.gather():
                    self.context.note_gather(unit)
            unit.show_full()

    def finish_refresh(self, *, of_idle: bool = False) -> None:
        """Wait for what is being refreshed, and show it. `of_idle`: if this module did not run in the last forward, at its fence."""
        if of_idle:
            has_run, self._has_run = self._has_run, False
            if has_run:
                return
        assert self.context is not None
        for unit in self.units:
            if unit.storage.lasts and unit.storage.is_under_way:
                with self.context.communicating():
                    unit.finish_refresh()
                unit.show_full()

    def begin(self) -> None:
        """Before the outermost forward: what an earlier one has left full holds the values of then."""
        assert self.context is not None
        for unit in self._gathered:
            unit.check_owners()  # before the shards are shown again in place of what somebody has put there
        in_graph, self._in_graph = self._in_graph and self.context.has_graph, False
        self.release()
        if in_graph:
            self._gather()
            self._in_graph = True

    def release(self, *, keep: bool = False, for_backward: bool = False) -> None:
        """Show the shards, and give back the memory of what does not last, unless it is held or to `keep`.

        `for_backward`: all of it or, where that was asked for, but this rank's piece of a smaller group's.
        """
        if self._is_held:
            return
        for unit in self._gathered:
            unit.show_shards()
            if not (keep or self._in_graph):
                unit.release(for_backward=for_backward)

    def hold(self) -> None:
        """Fill and show what does not last, until `let_go`. Collective."""
        self._gather()
        self._is_held = True

    def let_go(self) -> None:
        """End what `hold` began."""
        self._is_held = False
        self.release()

    def unshard(self) -> None:
        """Full parameters, filled and shown. Idempotent. Collective."""
        for unit in self.units:
            unit.refresh()
            unit.gather()
            unit.show_full()

    def reshard(self) -> None:
        """Shards shown, the memory of gathered parameters given back. Idempotent."""
        for unit in self.units:
            unit.show_shards()
            unit.release()

    def tidy(self) -> None:
        """Before somebody gets hold of the shards. A backward that ended in an exception nobody tells left full parameters shown."""
        if self.context is None:
            return
        if self.context.phase is Phase.BACKWARD and not _in_backward():
            self.context.reset()
        self.context.fence.settle()

    def reset(self) -> None:
        """As if no forward had begun."""
        self._graphs.clear()
        self._returned.clear()
        self.complete = self._ran = self._in_graph = False
        self.reshard()
        for unit in self.units:
            with suppress(Exception):  # the one that led here says more
                unit.finish_refresh()
            unit.drop_grads()

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast(args, dtype), cast(kwargs, dtype)

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast(output, dtype)

    # In backward

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Learn when the gradients of the inputs are there: by then those of the parameters are too."""
        leaves, rebuild = flatten(args, kwargs)
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not watched:
            return args, kwargs  # nothing flows back through it: complete at the end of the backward
        passed = _AfterBackward.apply(self, *(leaves[i] for i in watched))
        for i, tensor in zip(watched, passed, strict=True):
            leaves[i] = tensor
        return rebuild(leaves)

    def _check_outputs(self, output: Any) -> None:
        """RuntimeError if a part of the output is a full parameter's memory, which is about to be given back."""
        if not self._gathered:
            return
        for leaf in tensors_in(output):
            for unit in self._gathered:
                if leaf.untyped_storage().data_ptr() == unit.storage.flat.untyped_storage().data_ptr():
                    names = ", ".join(param.name for param in unit.params[:3])
                    raise RuntimeError(
                        f"a module returned one of its parameters ({names}, ...) or a view of one, whose memory is given back "
                        "after its forward; return a copy (param.clone(), through which gradients flow), or pass storage='resident'"
                    )

    def _watch_outputs(self, output: Any, written: int | None) -> None:
        """Have the parameters in place before a gradient flows into the module. `written`: see `Context.count_writes`."""
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._before_backward, written))

    def _before_backward(self, written: int | None, grad: torch.Tensor) -> torch.Tensor:
        assert self.context is not None
        if written is not None and written != self.context.count_writes():
            self.context.fence.forget()
            raise RuntimeError(
                "parameters were written between a forward and its backward (by an optimizer, an EMA, a load), which would compute the "
                "gradients of neither; run the backward first, or the forward again"
            )
        self.context.begin_backward()
        if torch.is_grad_enabled():
            self.context.note_graph()
            self._in_graph = self._was_in_graph = True
        self._gather()
        return grad

    def gather_graph(self) -> None:
        """A backward is about to use full parameters of a graph that an earlier one made. Idempotent. Collective."""
        if self._was_in_graph:
            self._gather()

    def begin_backward(self) -> None:
        """A backward has begun, perhaps elsewhere."""
        self.complete = False
        self._missing = self._num_trained if self._counts and self._ran else -1

    def on_grad(self) -> None:
        """Autograd has added up the gradient of one of the parameters."""
        self._missing -= 1
        if self._missing == 0:
            self._completed()

    def add_graph(self, node: Any) -> None:
        """A forward has begun whose inputs' gradients come back to `node`, as `after_backward` is told."""
        self._graphs.add(node)

    def after_backward(self, node: Any) -> None:
        """The gradients of one forward's inputs are there."""
        assert self.context is not None
        self._returned.add(node)
        if self.context.makes_graph:
            return  # which is to be gone through again
        if all(other in self._returned or _is_spent(other) for other in self._graphs):
            self.release()
            self._completed()

    def _completed(self) -> None:
        assert self.context is not None
        self.complete = self.reduces_early
        self.context.reduce_complete()

    def end_backward(self) -> None:
        """The whole backward has ended."""
        assert self.context is not None
        if self._missing > 0 and self._ran and not self.context.makes_graph:
            self._counts = False
        self._returned.clear()
        self._ran = False
        self.release()
        self.complete = True


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on unchanged; its backward tells the module's state that it is through."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        state.add_graph(ctx)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.state.after_backward(ctx)
        if torch.is_grad_enabled():
            for grad in grads:
                if grad is not None and grad.requires_grad:
                    grad.register_hook(ctx.state.context.gather_graph)
        return (None, *grads)


def _is_spent(node: Any) -> bool:
    """Whether a backward has gone through a graph's node, and freed what it saved: no other will."""
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def _in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1
