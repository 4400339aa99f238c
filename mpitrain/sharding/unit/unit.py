"""A unit: the parameters of one sharded module, without those of sharded modules inside it. They are unsharded and resharded together.

The term is from the FSDP paper (Zhao et al., VLDB 2023). Between two forwards a unit goes through these states:

    SHARDED --begin_unshard--> UNSHARDING --unshard--> UNSHARDED --reshard--> SHARDED        (`unshard` alone does the first two)
                                                           |  ^
                                                         hide unshard
                                                           v  |
                                                          HIDDEN         (`show_copies` and `reshard`: from and to SHARDED, by COPIED)

`mpitrain.sharding.step.step.TrainingStep` decides when a unit changes its state.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import Guards, ShardedParameter
from mpitrain.sharding.unit.policy import MixedPrecisionPolicy
from mpitrain.torch_glue.torch_internals import storage_of

if TYPE_CHECKING:
    from mpitrain.sharding.compression.compression import Compression


class Promise(NamedTuple):
    """Arguments of `fully_shard` that are checked at the model's first forward, because the check needs the whole model."""

    keep_fp32: tuple[str, ...]
    ignored_params: Sequence[nn.Parameter]


class UnitState(Enum):
    """The parameters that the modules see, and the memory of the full parameters."""

    SHARDED = "the modules see the shards; full parameters that do not last have no memory"
    UNSHARDING = "the modules see the shards; the fill of the full parameters has begun"
    UNSHARDED = "the modules see the full parameters"
    HIDDEN = "the modules see the shards; the full parameters keep their values"
    COPIED = "the modules see copies of the full parameters, to be written to"


class Unit:
    """The parameters of one module: `flats`, one for each dtype and `requires_grad`."""

    def __init__(
        self,
        ranks: DataParallelRanks,
        flats: list[FlatParameters],
        policy: MixedPrecisionPolicy,
        *,
        stage: int,
        reshard_after_forward: bool,
        prefetch_bytes: int | None = None,
        is_automatic: bool = False,
        slices: Slices | None = None,
    ) -> None:
        self.name = ""
        """The module's path in the outermost module, and its class, for messages. It is set at the first forward."""
        self.ranks = ranks
        self.flats = flats
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.prefetch_bytes = prefetch_bytes  # only the value of the outermost module is used
        self.is_automatic = is_automatic  # `fully_shard` chose this module as a block of the module in its argument
        self.reduces_early = stage != 1  # reduce as soon as the unit is complete, not at the end of the backward
        self.sync_gradients = True  # a backward reduces its gradients
        self.sync_copies = True  # ... over all copies of the model, and not within this one alone: see local/diloco.py
        self.slices = slices  # of a global batch: each backward is a round
        self.promise: Promise | None = None
        self.compression: Compression | None = None  # of the whole model
        self.diloco: Any = None  # the DiLoCo of the whole model: local/diloco.py imports this module
        self.guards: Guards | None = None  # of the modules that use the parameters
        self.state = UnitState.SHARDED

    @property
    def params(self) -> list[ShardedParameter]:
        """All parameters."""
        return [param for flat in self.flats for param in flat.params]

    @property
    def lasts(self) -> bool:
        """Whether the full parameters stay in memory between two uses."""
        return all(flat.storage.lasts for flat in self.flats)

    @property
    def overlaps(self) -> bool:
        """Whether the all-gather of `begin_unshard` progresses while this rank computes. The same on all ranks."""
        return bool(self.flats) and all(flat.storage.overlaps for flat in self.flats)

    @property
    def nbytes(self) -> int:
        """The size of the full parameters that do not last."""
        return sum(flat.storage.nbytes for flat in self.flats if not flat.storage.lasts)

    @property
    def is_under_way(self) -> bool:
        """Whether an all-gather of the full parameters goes on."""
        return any(flat.storage.is_under_way for flat in self.flats)

    # Transitions

    def _from(self, *states: UnitState) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"the unit of {self.name or 'a module'} is {self.state.name}; expected {' or '.join(s.name for s in states)}"
            )

    def begin_unshard(self) -> None:
        """Begin to fill the full parameters. Collective."""
        self._from(UnitState.SHARDED)
        for flat in self.flats:
            flat.begin_fill()
        self.state = UnitState.UNSHARDING

    def unshard(self) -> bool:
        """Fill the full parameters unless they are full, and show them; from any state. Returns whether it filled them (collective)."""
        filled = [flat.fill() for flat in self.flats]
        for flat in self.flats:
            flat.show_full()
        if self.guards is not None:
            self.guards.lift()
        self.state = UnitState.UNSHARDED
        return any(filled)

    def hide(self) -> None:
        """Let the modules see the shards; the full parameters keep their values."""
        self._from(UnitState.UNSHARDED, UnitState.HIDDEN)
        for flat in self.flats:
            flat.show_shards()
        self._guard()
        self.state = UnitState.HIDDEN

    @torch.no_grad()
    def show_copies(self) -> dict[ShardedParameter, nn.Parameter]:
        """Let the modules see copies of the full parameters, until `reshard`; from any state. Collective."""
        self.reshard()
        copies: dict[ShardedParameter, nn.Parameter] = {}
        with torch.inference_mode(False):
            for flat in self.flats:
                copies |= flat.show_copies()
        if self.guards is not None:
            self.guards.lift()
        self.state = UnitState.COPIED
        return copies

    def reshard(self, *, for_backward: bool = False) -> None:
        """Show the shards, and free the full parameters that do not last; allowed in any state.

        `for_backward`: if `reshard_after_forward` is a number N, this rank keeps its piece for its group of N ranks.
        """
        for flat in self.flats:
            flat.show_shards()
            flat.free(for_backward=for_backward)
        self._guard()
        self.state = UnitState.SHARDED

    def _guard(self) -> None:
        if self.guards is not None:
            self.guards.put()

    def expire(self) -> None:
        """After a possible change of the shards: the next use fills full parameters that last, unless the shards are part of them."""
        self._from(UnitState.SHARDED)
        for flat in self.flats:
            flat.storage.expire()

    def abandon(self) -> None:
        """Go back to SHARDED after an exception, without communication. Drop gradients that were not reduced."""
        for flat in self.flats:
            with suppress(Exception):  # the first exception says more
                flat.storage.end_fill()
        self.reshard()
        for flat in self.flats:
            flat.reset_grads()

    # Checks

    def check_output(self, tensors: list[torch.Tensor]) -> None:
        """RuntimeError if the module's output has memory of a full parameter, which is about to be freed."""
        memories = {storage_of(tensor) for tensor in tensors}
        for flat in self.flats:
            if not flat.storage.lasts and storage_of(flat.storage.full_buffer) in memories:
                names = ", ".join(param.name for param in flat.params[:3])
                raise RuntimeError(
                    f"a module returned one of its parameters ({names}, ...) or a view of one, whose memory is freed "
                    "after its forward; return a copy (param.clone(), through which gradients flow), or pass storage='resident'"
                )


# Look-ups: the unit of a module, the units of a model, and the parameter of a shard

_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()
_around: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()


def enter(unit: Unit) -> None:
    """Add a unit to those of this process. The registry does not keep the unit alive."""
    _units.add(unit)


def enter_parts(module: nn.Module) -> list[nn.Module]:
    """Record the parts of a module that is sharded, up to sharded ones. Returns the module and the plain ones of these parts."""
    plain = [module]
    around = weakref.ref(module)
    for part in plain:  # which grows
        for child in part.children():
            if around_of(child) is None:
                _around[child] = around
                if unit_of(child) is None:
                    plain.append(child)
    return plain


def around_of(module: nn.Module) -> nn.Module | None:
    """The innermost sharded module that has `module` as a part; None if there is none, or not any more."""
    found = _around.get(module)
    return None if found is None else found()


def root_of(module: nn.Module) -> nn.Module:
    """The outermost sharded module around a module; the module itself if there is none."""
    while (around := around_of(module)) is not None:
        module = around
    return module


def all_sharded() -> Iterator[ShardedParameter]:
    """Every sharded parameter of this process. The order is not the same on all ranks."""
    for unit in list(_units):
        yield from unit.params


def find(key: int) -> ShardedParameter | None:
    """The parameter whose shard has the `id` of `key`; None if there is none."""
    return next((param for param in all_sharded() if id(param.shard) == key), None)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a sharded module; None for any other module."""
    return vars(module).get("_unit")


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class that a sharded module had before `fully_shard`; the class of any other module."""
    return type(module).__mro__[0 if unit_of(module) is None else 2]


def units_of(model: nn.Module) -> list[Unit]:
    """The units of all sharded modules of a model, in the order of the modules."""
    return [unit for unit in map(unit_of, model.modules()) if unit is not None]


def sharded_params(model: nn.Module) -> Iterator[ShardedParameter]:
    """Every sharded parameter of a model, in the order of the modules."""
    for unit in units_of(model):
        yield from unit.params


def params_by_shard(model: nn.Module) -> dict[torch.Tensor, ShardedParameter]:
    """Every sharded parameter of a model by its shard."""
    return {param.shard: param for param in sharded_params(model)}


def compression_of(model: nn.Module) -> "Compression | None":
    """The compression of a model's gradients; None without one."""
    return next((unit.compression for unit in units_of(model) if unit.compression is not None), None)


def diloco_of(model: nn.Module) -> Any:
    """The `DiLoCo` of a model with local steps; None without them."""
    return next((unit.diloco for unit in units_of(model) if unit.diloco is not None), None)


def slices_of(model: nn.Module) -> Slices | None:
    """The slices of a global batch of a model; None without them."""
    return next((unit.slices for unit in units_of(model)), None)


def sharded_over(model: nn.Module) -> DataParallelRanks | None:
    """The ranks over which a model is sharded; None for a model that is not sharded."""
    return next((unit.ranks for unit in units_of(model)), None)
