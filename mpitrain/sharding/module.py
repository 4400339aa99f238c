"""What a sharded module is, and what is asked of a model that has such parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.sharding.buffers import sync_buffers
from mpitrain.sharding.setup.foreign import refuse_wrapping
from mpitrain.sharding.setup.readiness import check_ready
from mpitrain.sharding.step.step import TrainingStep
from mpitrain.sharding.step.tree import check_added
from mpitrain.sharding.unit.registry import kind_of, units_of
from mpitrain.sharding.unit.rows import mark_model
from mpitrain.sharding.unit.unit import Unit, UnitState


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module: its class becomes a subclass of this and of what it was."""

    _unit: Unit
    _step: TrainingStep | None = None  # of the outermost sharded module around this one; made at its first forward

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class that was sharded: torch makes a slice of a Sequential by the class of the whole."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with full parameters in place."""
        return step_of(self).forward(self._unit, super().__call__, args, kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; the shards, but within forward and backward."""
        self._tidy()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: the shards, which refuse to be written into a file as if they were whole (`Rows`)."""
        self._tidy()
        found = super().state_dict(*args, **kwargs)
        mark_model(self, self._unit, found, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; drops what waits to be reduced after `no_sync` as well, which an optimizer's `zero_grad` cannot."""
        super().zero_grad(set_to_none)
        if self._step is not None:
            self._step.reducer.drop()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients over the ranks. Without, each rank keeps its full gradients, which takes as much memory
        as the unsharded model's, and the next backward with it reduces the sum."""
        for unit in units_of(self) if recurse else [self._unit]:
            unit.sync_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the block reduce nothing: see `set_requires_gradient_sync`.

        What they leave is not in `param.grad`: until a backward outside has reduced it, clipping and an optimizer's step raise, and
        `model.zero_grad()` drops it, where an optimizer's `zero_grad` would not.
        """
        before = [(unit, unit.sync_gradients) for unit in units_of(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, synced in before:
                unit.sync_gradients = synced

    def unshard(self) -> None:
        """Fill and show the full parameters of this module (not of modules sharded within it). Collective."""
        if self._unit.state is UnitState.SHARDED:
            self._unit.expire()
        self._unit.unshard()

    def reshard(self) -> None:
        """Show the shards again and give the memory back."""
        self._unit.reshard()

    def _tidy(self) -> None:
        if self._step is not None:
            self._step.tidy()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `double`, `cuda` and the like end here. The full parameters would not follow the shards."""
        for param in self.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise TypeError(
                    f"a sharded model cannot be cast or moved (here from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device}); do so before fully_shard, or compute in another dtype by mp_policy"
                )
        for part in self.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = fn(buffer)  # `to_empty` gives them memory; parameters have it
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What torch's DistributedDataParallel asks a module for, before anything else."""
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


def steps_of(model: nn.Module) -> set[TrainingStep]:
    """The steps that the sharded modules of a model take part in; none before the first forward."""
    return {module._step for module in sharded_modules(model) if module._step is not None}


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank's forwards and backwards have spent in communication, waiting for other ranks included."""
    return sum(step.comm_s for step in steps_of(model))


def outermost(model: nn.Module) -> Iterator[ShardedModule]:
    """The sharded modules of a model that are within no other one."""
    if isinstance(model, ShardedModule):
        yield model
    else:
        for child in model.children():
            yield from outermost(child)


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """All sharded modules of a model, in order."""
    return [module for module in model.modules() if isinstance(module, ShardedModule)]


def step_of(module: ShardedModule) -> TrainingStep:
    """The step that a module is part of; made at the first forward, by the outermost module. Collective then."""
    if module._step is not None:
        return module._step
    parts, ranks = sharded_modules(module), module._unit.ranks
    if any(part._step is not None for part in parts):
        raise RuntimeError(
            f"a part of this {type(module).__name__} was run alone before the whole; call the whole model first"
        )
    check_added(module)
    check_ready(module, [part._unit for part in parts], ranks.data_parallel)
    # What is allocated now outlives this forward, which may be one of an evaluation in inference mode.
    with torch.inference_mode(False):
        sync_buffers(module, "broadcast")
        step = TrainingStep(module, [part._unit for part in parts], ranks)
    for name, part in module.named_modules():
        if isinstance(part, ShardedModule):
            part._step = step
            part._unit.name = f"{name} ({kind_of(part).__name__})" if name else kind_of(part).__name__
    return step
