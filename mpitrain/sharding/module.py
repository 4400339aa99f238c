"""`ShardedModule`, the class of a module after `fully_shard`, and the queries of a model that has sharded modules."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from mpitrain.placement.marks import box_of
from mpitrain.placement.part_tensor import LOAD_WHOLE
from mpitrain.placement.parts import stages_of
from mpitrain.sharding.buffers import sync_buffers
from mpitrain.sharding.setup.blocks import has_forward
from mpitrain.sharding.setup.foreign import refuse_wrapping
from mpitrain.sharding.setup.readiness import check_ready
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.step.changes import check_added
from mpitrain.sharding.step.checks.reach import outside, refuse_gradient
from mpitrain.sharding.step.state import Phase
from mpitrain.sharding.step.step import TrainingStep
from mpitrain.sharding.unit.parameter import Guards
from mpitrain.sharding.unit.rows import mark_model
from mpitrain.sharding.unit.unit import (
    Unit,
    UnitState,
    enter_parts,
    kind_of,
    root_of,
    sharded_params,
    unit_of,
    units_of,
)
from mpitrain.torch_glue.torch_internals import keep_compiler_out, not_compiled, set_compiler


class ShardedModule(nn.Module):
    """The methods that `fully_shard` adds to a module: the module's class becomes a subclass of this and of its former class."""

    _unit: Unit = None  # type: ignore[assignment]  # an attribute of the class, so that torch's OptimizedModule keeps its own
    _step: TrainingStep | None = (
        None  # shared with the outermost sharded module around this one, whose first forward makes it
    )
    _is_entry = False  # `register_forward_method` has made its calls forwards also outside of the root's forward

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the former class: torch makes a slice of a Sequential with the class of the whole."""
        return cls.__mro__[2](*args, **kwargs)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with full parameters in place."""
        return call_module(self, super().__call__, args, kwargs, entry=self if self._is_entry else None)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters: the shards, except within a forward or a backward."""
        self._before_reads()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict. Its values are the shards as `PartTensor`, which cannot be written to a file in place of whole tensors."""
        self._before_reads()
        found = super().state_dict(*args, **kwargs)
        mark_model(self, self._unit, found, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's shards, as `state_dict` has them. RuntimeError with advice for whole tensors."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            if stages_of(self.parameters()) is None or LOAD_WHOLE in str(error):
                raise
            raise RuntimeError(f"{error}; if these are of other stages of the pipeline: {LOAD_WHOLE}") from None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those that wait after `no_sync`, which the `zero_grad` of an optimizer does not drop."""
        super().zero_grad(set_to_none)
        for unit in units_of(self):
            if unit.state is UnitState.UNSHARDED:  # within `unshard` the shards, which have the gradients, are hidden
                for param in unit.params:
                    if set_to_none or param.shard.grad is None:
                        param.shard.grad = None
                    else:
                        param.shard.grad.zero_()
        if self._step is not None:
            self._step.reset()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients over the ranks. Without it each rank keeps its full gradients, which need as much
        memory as those of the unsharded model. The next backward with a reduction reduces the sum. ValueError for a model with slices.
        """
        if not requires_gradient_sync and self._unit.slices is not None:
            raise ValueError(
                "no_sync: the gradients of a model with slices are added up slice by slice, in one order; expected backwards without "
                "no_sync, one for each round of mpitrain.rounds(model)"
            )
        for unit in units_of(self) if recurse else [self._unit]:
            unit.sync_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the block reduce nothing: see `set_requires_gradient_sync`.

        Their gradients are not in `param.grad`. Until a backward outside of the block has reduced the gradients, clipping and an
        optimizer's step raise an error. `model.zero_grad()` drops these gradients; an optimizer's `zero_grad` does not.
        """
        before = [(unit, unit.sync_gradients) for unit in units_of(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, synced in before:
                unit.sync_gradients = synced

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backwards under `no_sync` have left, if there are any. Collective, outside of the block."""
        if self._step is not None:
            self._step.reduce_gradients()

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """In the block each rank has one backward, or none, if it has no gradient to compute: then it takes part in the end of the
        backwards of other ranks, with zeros. Collective."""
        with step_of(self).one_backward():
            yield

    def slices_of_step(self) -> Slices | None:
        """The slices of a global batch, each of which needs a backward; None without them."""
        return self._unit.slices

    def full_parameter(self, shard: nn.Parameter) -> nn.Parameter:
        """The parameter that forward and backward use in the place of a shard."""
        return next(param.full for param in sharded_params(self) if param.shard is shard)

    def set_stage(self, stage: int, *, is_round: bool = True) -> None:
        """The next forward or backward of a model with slices is one of this stage of a pipeline.

        `is_round`: whether the backward is a round of the stage. Otherwise its gradients stay full, for `take_full_gradients`.
        """
        step_of(self).set_stage(stage, is_round=is_round)

    def take_full_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Take the gradients of full parameters that a backward has not reduced, each with its parameter."""
        found = [(param.full, param.full.grad) for param in sharded_params(self) if param.full.grad is not None]
        for full, _ in found:
            full.grad = None
        return found

    def end_step_of_stages(self) -> None:
        """End a step of a pipeline with slices, after the last round of all stages. Collective."""
        step_of(self).end_step_of_stages()

    def unshard(self) -> None:
        """Fill and show the full parameters of this module, but not of sharded modules within it. Collective."""
        if self._unit.state is UnitState.SHARDED:
            self._unit.expire()
        self._unit.unshard()

    def reshard(self) -> None:
        """Show the shards again and free the full parameters."""
        self._unit.reshard()

    def _before_reads(self) -> None:
        if self._step is not None:
            self._step.before_reads()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `double`, `cuda` and similar methods call this: an error, because the full parameters would not follow the shards."""
        for param in self.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise TypeError(
                    f"a sharded model cannot be cast or moved (here from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device}); do so before fully_shard, or choose another dtype by mp_policy"
                )
        for part in self.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = fn(buffer)  # `to_empty` gives memory to buffers; parameters have memory
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """The first attribute that torch's DistributedDataParallel reads."""
        refuse_wrapping(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "a sharded model cannot be copied; for an average of its weights (torch's AveragedModel) make mpitrain.EMA(model, decay), "
            "else copy it before fully_shard, or save it and load the copy"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sharded model cannot be pickled; use mpitrain.save, or pickle mpitrain.full_state_dict(model)"
        )


_kinds: "weakref.WeakKeyDictionary[type[nn.Module], type[nn.Module]]" = weakref.WeakKeyDictionary()


def sharded_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of the sharded modules of a class: one for all, because torch's compiler compiles blocks again for another class."""
    if kind not in _kinds:
        _kinds[kind] = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    return _kinds[kind]


def steps_of(model: nn.Module) -> set[TrainingStep]:
    """The steps of the sharded modules of a model; empty before the first forward."""
    return {module._step for module in sharded_modules(model) if module._step is not None}


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank's forwards and backwards have spent in communication, including waits for other ranks."""
    return sum(step.comm_s for step in steps_of(model))


def outermost(model: nn.Module) -> Iterator[ShardedModule]:
    """The sharded modules of a model that are in no other sharded module."""
    if isinstance(model, ShardedModule):
        yield model
    else:
        for child in model.children():
            yield from outermost(child)


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """All sharded modules of a model, in order."""
    return [module for module in model.modules() if isinstance(module, ShardedModule)]


def step_of(module: ShardedModule) -> TrainingStep:
    """The step of a module. The first forward of the outermost module makes it, which is collective."""
    if module._step is not None:
        return module._step
    root = root_of(module)
    parts, ranks = sharded_modules(root), unit_of(root).ranks  # type: ignore[union-attr]
    if any(part._step is not None for part in parts):
        raise RuntimeError(
            f"a part of this {kind_of(root).__name__} was run alone before the whole; call the whole model first"
        )
    check_added(root)
    check_ready(root, [part._unit for part in parts], ranks.data_parallel)
    # The memory allocated here outlives this forward, which may run in inference mode.
    with torch.inference_mode(False):
        sync_buffers(root, "broadcast")
        step = TrainingStep(root, [part._unit for part in parts], ranks)
    for name, part in root.named_modules():
        if isinstance(part, ShardedModule):
            part._step = step
            part._unit.name = f"{name} ({kind_of(part).__name__})" if name else kind_of(part).__name__
    return step


@not_compiled
def call_module(
    module: ShardedModule,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    entry: nn.Module | None,
) -> Any:
    """Call a method with the full parameters of a sharded module in place.

    `entry`: the module, or the part of it, whose method it is, if it may be called outside of the root's forward.
    """
    if module._unit.state is UnitState.COPIED:
        return method(*args, **kwargs)
    compiler = set_compiler(None)  # it would trace the code around the module's forward
    if compiler is not None:
        keep_compiler_out()
    try:
        step = module._step or _first_step(module, is_entry=entry is not None)
        its = method if compiler is None else partial(_compiled, compiler, method)
        return step.forward(module._unit, its, args, kwargs, entry=entry)
    finally:
        if compiler is not None:
            set_compiler(compiler)


def _compiled(compiler: Any, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    set_compiler(compiler)
    try:
        return method(*args, **kwargs)
    finally:
        set_compiler(None)


def _first_step(module: ShardedModule, *, is_entry: bool) -> TrainingStep:
    if not is_entry and root_of(module) is not module:
        raise outside(module)  # before the messages of a first forward, which the other ranks may not send
    return step_of(module)


def guard(module: ShardedModule) -> None:
    """From now on no call of a sharded module or of its plain parts computes with shards, and no gradient goes into shards."""
    for param in module._unit.params:
        param.guard_gradient(refuse_gradient)
    plain = enter_parts(module)
    users = [
        part for part in plain if has_forward(part) and any(box_of(param) is not None for param in part.parameters())
    ]
    module._unit.guards = Guards(users, partial(_call_outside, weakref.ref(module)))
    module._unit.guards.put()


def _call_outside(
    around: "weakref.ref[ShardedModule]",
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The call of a module that shows shards of the unit of `around`: an error, unless the call is a forward in its own right."""
    owner = around()
    assert owner is not None and owner._unit.guards is not None
    is_entry = owner._is_entry if module is owner else module in owner._unit.guards.entries
    if module is not owner and not is_entry:
        raise outside(module, is_in_forward=owner._step is not None and owner._step.phase is not Phase.IDLE)
    return call_module(owner, forward, args, kwargs, entry=module if is_entry else None)
