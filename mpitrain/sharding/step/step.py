"""The step of one sharded model: its phase, and the order in which its units are unsharded, resharded and reduced.

A parameter between two forwards (unit/storage.py says which full parameters are gathered, and which last):
1. The outermost forward begins with `begin_pass`: full parameters that last are filled from the shards and shown, if that needs no
   all-gather.
2. `ShardedModule.__call__` calls `forward`. `_unshard` fills all other full parameters of the module, and the module shows them.
3. After the module's own forward `_reshard` shows the shards again and frees gathered full parameters, unless `reshard_after_forward`
   keeps them, or a part of them. Those of the outermost module stay, because the backward begins there. `end_pass` shows the shards of
   the full parameters that last after the outermost forward.
4. A backward follows a route ([Note: route] in route.py). `_begin_backward` unshards the units that last. Before the backward comes
   into a call of a module, `_enter` unshards any other unit. `_complete` or `_end_backward` reshards them, and `end_pass` those that
   last.
5. The optimizer writes the shards, those in resident memory after a fence (changes.py). The next forward fills full parameters.

A gradient between autograd and the optimizer:
1. autograd stores the full gradient in `.grad` of the full parameter, and its hook calls `on_gradient`.
2. On CPUs `Reducer.take` moves the gradient into the gradient buffer if its unit is next in the order of reductions. On a GPU the
   next step does so.
3. When the unit is complete ([Note: complete] in reducer.py), `Reducer.complete` begins a reduce-scatter (`Gradients.begin_reduction`),
   or an all-reduce where shards are whole. The backward continues. Gradients that are sums over `tp` ranks are added up before it.
   With `compress_gradients` see [Note: compressed] in reducer.py.
4. `Gradients.end_reduction` makes this rank's rows of the mean the `.grad` of the shards, or adds them to it. `_end_backward` waits for
   the last reduction. The optimizer then finds the shards and their gradients in `model.parameters()`.

[Note: second derivatives] A backward with create_graph=True makes a graph that uses full parameters. After such a backward the full
parameters stay until an optimizer updates them, until `reshard()`, or until another backward has ended, which counts as the backward
through that graph, and the next forward begins. A later backward through the graph raises torch's error for modified tensors.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mpitrain.plans.draws import seeded_at_places
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.step.backward import Backwards
from mpitrain.sharding.step.calls import UnitCall, aligned, cast, tensors_in
from mpitrain.sharding.step.checks.reach import check_error, check_graph, outside
from mpitrain.sharding.step.checks.watch import AccessWatch
from mpitrain.sharding.step.state import Graph, Phase
from mpitrain.sharding.unit.unit import Unit, UnitState
from mpitrain.torch_glue.torch_internals import in_backward


class TrainingStep(Backwards):
    """The step of the units under one outermost module, `root`. `units`: in the order of `root.modules()`. Collective."""

    def __init__(self, root: nn.Module, units: list[Unit], ranks: DataParallelRanks) -> None:
        super().__init__(root, units, ranks)

    # Forward

    def forward(
        self,
        unit: Unit,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        entry: nn.Module | None = None,
    ) -> Any:
        """Run a module's own forward, `call`, or another method of it, with the full parameters of its unit in place.

        `entry`: by `register_forward_method` the call may be the outermost one, although the module is not. It is one of this module,
        or of a part of the unit's module.
        """
        if in_backward():
            return self._run_again(unit, call, args, kwargs)
        is_root, with_grad = self.phase is not Phase.FORWARD, torch.is_grad_enabled()
        if is_root:
            self._check_root(unit, entry)
        is_outermost = not self._running
        is_inner = unit in self._running  # a method calls its own module, or the module calls itself
        try:
            if is_root:
                self.begin_pass()
            elif is_outermost:  # within `unshard`
                self._notice_writes()
            self._running.add(unit)
            self._ran.add(unit)
            self._reruns.note(unit, is_outermost=is_outermost, with_grad=with_grad)
            run = self._run_root if is_root else self._run
            output = run(unit, call, args, kwargs, is_outermost=is_outermost, entry=entry)
            if not unit.lasts and unit not in self._held:
                unit.check_output(tensors_in(output))
        except BaseException as error:
            if is_root:
                try:
                    if isinstance(error, Exception) and self._compares:  # not for Ctrl-C
                        check_error(error, self._passing, self._tree.module)
                finally:
                    self.abandon()  # no fence: the other ranks may be anywhere
            raise
        finally:
            if not is_inner:
                self._running.discard(unit)
        if not unit.lasts and not is_inner:
            # The outermost module's backward comes first: its unit stays full for it.
            self._reshard(unit, keep=not unit.reshard_after_forward or (is_root and with_grad), for_backward=with_grad)
        if is_root:
            self.end_pass(before_backward=with_grad)
        return output

    def _run_again(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Within a backward: activation checkpointing computes a forward again, and the backward that follows needs the parameters."""
        self._ensure_backward()  # with reentrant checkpointing this may be the first call of a backward
        if self._reruns.run_again(unit):
            self.reducer.expect_all(unit)
        return self._run(unit, call, args, kwargs)

    def _check_root(self, unit: Unit, entry: nn.Module | None) -> None:
        """RuntimeError if the outermost call is none of the model, nor of a registered method, or would use copies of parameters."""
        self._check_copies()
        if unit is not self.units[0] and entry is None:
            if self.phase is Phase.BACKWARD:
                self.abandon()  # an exception has ended it
            if unit.state is not UnitState.UNSHARDED:  # `ShardedModule.unshard`
                raise outside(self._module_of(unit))

    def _run_root(
        self,
        unit: Unit,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_outermost: bool,
        entry: nn.Module | None,
    ) -> Any:
        """`_run` for the outermost call, with what a forward as a whole needs: inputs compared, random draws, checks at its end."""
        with_grad = torch.is_grad_enabled()
        slice_buffers = self._slice_buffers if with_grad else None
        if slice_buffers is not None:
            slice_buffers.begin_forward()
        if with_grad and self._inputs is not None:
            self._inputs.look(args, kwargs)
        if unit.slices is not None:
            args, kwargs = aligned((args, kwargs))
        with self._watching(call), seeded_at_places() if slice_buffers is not None else nullcontext():
            output = self._run(unit, call, args, kwargs, is_outermost=is_outermost, entry=entry)
        if slice_buffers is not None:
            slice_buffers.end_forward()
        self._full_writes.check()
        if with_grad and not self._is_reach_checked:
            # Code that reaches into other modules does so in every forward, so one check of a graph is enough.
            check_graph(output, self._passing, self._tree.module)
            self._is_reach_checked = True
        return output

    def _run(
        self,
        unit: Unit,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_outermost: bool = False,
        entry: nn.Module | None = None,
    ) -> Any:
        """Unshard a unit, and run its module's own forward with the dtypes of the policy."""
        self._unshard(unit)
        is_recorded = torch.is_grad_enabled() and (is_outermost or not unit.lasts)
        with UnitCall(self, unit, self._writes, entry) if is_recorded else nullcontext():
            policy = unit.policy
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                args, kwargs = cast((args, kwargs), policy.param_dtype)
            output = call(*args, **kwargs)
            return output if policy.output_dtype is None else cast(output, policy.output_dtype)

    def _check_copies(self) -> None:
        """RuntimeError in a forward that would use copies of some parameters, and full parameters in the place of others."""
        copied = next((unit for unit in self.units if unit.state is UnitState.COPIED), None)
        if copied is not None:
            raise RuntimeError(
                f"a forward of the model within `unshard(part, write=True)`, which shows copies of the parameters of {copied.name} "
                "alone; call that part, or unshard the whole model: `with mpitrain.unshard(model, write=True):`"
            )

    def _watching(self, call: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Around an outermost forward. What a forward must not do it mostly does in its first one of a kind already."""
        kind = getattr(call, "__name__", ""), torch.is_grad_enabled(), self._tree.module.training
        if kind in self._watched:
            return nullcontext()
        self._watched.add(kind)
        return AccessWatch(self.units, self._tree.module)

    def begin_pass(self) -> None:
        """Called before the outermost forward: see [Note: fences] in changes.py. First cleans up after an earlier exception."""
        if self.phase is not Phase.IDLE:
            self.abandon()
        if self.reducer.reducing is not None:
            self.reducer.abandon()
        self._fence.skip()
        self._tree.check()
        if self._graph is Graph.USED:
            self._graph = Graph.NONE
        for unit in self.units:
            for flat in unit.flats:
                flat.check_shown()  # before `reshard` overwrites a parameter that the user has put in place of one of these
            was_full = unit.state is not UnitState.SHARDED
            unit.reshard()  # the full parameters hold the values of an earlier forward
            unit.expire()
            if self._graph is Graph.LIVE and was_full and not unit.lasts:
                unit.unshard()
                unit.hide()
        self._notice_writes()
        self._full_writes.begin()
        self.phase = Phase.FORWARD
        with self._communicating():
            for unit in self._lasting:
                unit.begin_unshard()
            if not (torch.is_grad_enabled() and self.reducer.frozen and self._agree()):
                self._fence.wait()
        ran, self._ran = self._ran, set()
        for unit in self._lasting:
            if unit not in ran or not unit.is_under_way:  # other modules may use its parameters; or no wait is left
                self._unshard(unit)
        with self._communicating():
            self._prefetch.begin("forward")

    def _agree(self) -> bool:
        """Let the reducer find thawed parameters. Returns whether its message replaces the fence, because the same ranks took part."""
        together = self._trained_together(self.ranks)
        if self.reducer.agree(together):
            self._watch_gradients()
        return self._fence.num_ranks == together.size

    # Between steps

    def set_stage(self, stage: int, *, is_round: bool) -> None:
        """The next forward or backward is one of this stage of a pipeline. `is_round`: see `ShardedModule.set_stage`."""
        self.reducer.stages = (stage,) if is_round else ()
        if self._slice_buffers is not None:
            self._slice_buffers.stage = stage

    def end_step_of_stages(self) -> None:
        """Merge the buffers after the last round of all stages. Collective."""
        if self._slice_buffers is not None:
            with self._communicating():
                self._slice_buffers.end_step()

    def reset(self) -> None:
        """Drop gradients that wait, and the rounds of a step with slices that has not ended."""
        self.reducer.reset()
        if self._slice_buffers is not None:
            self._slice_buffers.reset()

    def before_reads(self) -> None:
        """Called before the model's parameters are returned to the user: after an exception in a backward the full ones are shown."""
        if self.phase is Phase.BACKWARD and not in_backward():
            self.abandon()
        self.end_fence()

    def begin_hold(self, unit: Unit) -> None:
        """Keep the full parameters of a unit filled and shown until `end_hold`. Collective."""
        self._unshard(unit)
        self._held.add(unit)

    @property
    def is_held(self) -> bool:
        """Whether some unit is kept filled until `end_hold`."""
        return bool(self._held)

    def end_hold(self, unit: Unit) -> None:
        """End `begin_hold`."""
        self._held.discard(unit)
        if not unit.lasts:
            self._reshard(unit)
