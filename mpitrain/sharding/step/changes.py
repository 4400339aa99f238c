"""Changes of a model's parameters: when a rank may write its shards, and errors for a forward that writes and for parameters that were
added.

[Note: fences] With resident units a rank's shards are rows of parameters that the other ranks of its node read. So a rank writes a
shard only between two fences: the closing fence at the end of every forward and backward of the outermost module, and the opening fence
of the next forward. The optimizer, `load` and all other code that writes shards runs there. A fence is a barrier of the ranks of a
node. After the opening fence all ranks have finished writing; after the closing fence all ranks have finished reading. Ranks of other
nodes read copies. Each rank begins the all-gather that updates the copies before the opening fence. If the all-gather overlaps with
computation, a rank waits for the all-gather of a unit before the unit's module runs, and shows the full parameters then. It waits for
the other units before the closing fence. The all-gather writes only rows of other nodes, into full parameters that are not in use
before its end, and reads shards, which no rank writes before the closing fence. Each rank begins the all-gather after its own writes,
and the all-gather ends when all ranks have taken part, so a rank that has waited for it reads new values. A rank waits at once for
units whose module did not run in the last forward, because other modules may use their parameters.

[Note: fence put off] If a backward will follow a forward, a rank passes the closing fence without waiting: it enters the barrier, and
continues. The fence at the end of the backward replaces this one. Other code that could write shards earlier (an optimizer, an EMA,
code that asks the model for its parameters) first waits until all ranks have entered the barrier: `before_writes` in state.py. Code
that writes to a shard that it got earlier causes an error, found by the shard's version counter.

[Note: writes in a forward] In a forward the modules show full parameters, and a momentum encoder, a codebook, or an embedding with
`max_norm` writes to them. What a write would do depends on the storage: the ranks of a node would write to the same memory one after
the other, gathered memory is freed, and a copy of each rank would differ from the others. So it is an error with each storage and on
any number of ranks. A write through `param.data` is seen in first forwards alone, by checks/watch.py.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from collectives import Communicator, Work
from mpitrain.placement.marks import box_of, is_ignored
from mpitrain.sharding.setup.readiness import some
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import ShardedParameter, functional_call
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_glue.torch_internals import count_writes, in_functional_call, writes_to_each


class Fence:
    """The fence of one model. `node`: the ranks that share its parameters; None without shared parameters. `shards`: this rank's."""

    def __init__(self, node: Communicator | None, shards: Sequence[torch.Tensor]) -> None:
        self._node, self._shards = node, shards
        self._barrier: Work | None = None  # the barrier of a fence that was put off
        self._writes = 0  # the count of writes to the shards when the fence was put off

    @property
    def num_ranks(self) -> int:
        """The number of ranks that take part; 0 without shared parameters."""
        return 0 if self._node is None else self._node.size

    def wait(self) -> None:
        """Wait until all ranks have reached the fence."""
        if self._node is not None:
            self._node.barrier()

    def begin(self) -> None:
        """Enter the fence's barrier without waiting: see [Note: fence put off]."""
        if self._node is not None:
            self._barrier, self._writes = self._node.barrier(async_op=True), count_writes(self._shards)

    def end(self) -> None:
        """Wait for the fence that was put off, if one was. Not collective."""
        if self._barrier is not None:
            self._barrier.wait()
            self._barrier = None

    def skip(self) -> None:
        """The step continues: the next fence replaces the fence that was put off. RuntimeError if shards were written meanwhile."""
        if self._barrier is None:
            return
        self._barrier = None
        if count_writes(self._shards) != self._writes:
            raise RuntimeError(
                "parameters were written between a forward that recorded a graph and the next pass, while other ranks may have been "
                "reading them; run a forward without backward under torch.no_grad(), or call model.parameters() again before you "
                "write to the parameters"
            )

    def abandon(self) -> None:
        """After an exception: no rank waits for the fence that was put off."""
        self._barrier = None


class FullWrites:
    """The full parameters of these units, as they were before a forward. 0.1 us for each of them, in few calls of Python."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._flats = [flat for unit in units for flat in unit.flats]
        self._params = [(flat, param) for flat in self._flats for param in flat.params]
        self._fulls = [param.full for _, param in self._params]
        self._buffers = [flat.storage.full_buffer for flat, _ in self._params if not flat.storage.lasts]
        self._place = self._sum_of_places()
        self._writes: tuple[int, ...] = ()
        self._outdated = set[FlatParameters]()

    def begin(self) -> None:
        """Called before a forward, and after other code of this package has counted as a write."""
        self._writes = writes_to_each(self._fulls)
        self._outdated = self._find_outdated()

    def check(self) -> None:
        """RuntimeError if a full parameter was written since `begin`, or if its memory was replaced, which is undone."""
        writes, outdated = writes_to_each(self._fulls), self._find_outdated()
        is_in_place = self._sum_of_places() == self._place
        # `outdate` counts as a write to each parameter.
        num_outdated = sum(len(flat.params) for flat in outdated) - sum(len(flat.params) for flat in self._outdated)
        if is_in_place and sum(writes) - sum(self._writes) == num_outdated:
            return
        moved: set[ShardedParameter] = set()
        if not is_in_place:
            moved.update(param for flat in self._flats for param in flat.put_back())
        written = []
        for (flat, param), now, old in zip(self._params, writes, self._writes, strict=True):
            if param in moved or now - (flat in outdated) != old - (flat in self._outdated):
                written.append((param, flat.storage.in_place and param not in moved))
        if written:
            raise RuntimeError(f"parameters were written in a forward. {fates_of(written)}. {REMEDY}")

    def _find_outdated(self) -> set[FlatParameters]:
        return {flat for flat in self._flats if flat.is_outdated}

    def _sum_of_places(self) -> int:
        """The addresses of the parameters, or their places in buffers that are freed and filled again."""
        return sum(map(torch.Tensor.data_ptr, self._fulls)) - sum(map(torch.Tensor.data_ptr, self._buffers))


REMEDY = (
    "There full parameters are for reading. Write after the forward: inside `with mpitrain.unshard(model, write=True)`, or to the "
    "shards if the elements of a parameter change by themselves, as in a clamp. Or make the tensor a buffer (register_buffer), which a "
    "forward may write"
)


def fates_of(written: Iterable[tuple[ShardedParameter, bool]]) -> str:
    """What has become of full parameters that were written, by name; each with whether shards are in the memory that was written."""
    names: dict[str, list[str]] = {}
    for param, in_place in written:
        fate = "not damaged, but the new values are lost"
        if in_place and param.ranks.data_parallel.size > 1:
            fate = "damaged, because the writes of several ranks have met, or each has written to its own copy; load these values again"
        elif in_place:
            fate = "not damaged, and this only rank has the new values"
        names.setdefault(fate, []).append(param.name)
    return "; ".join(f"{some(its)}: {fate}" for fate, its in names.items())


def check_added(module: nn.Module) -> None:
    """RuntimeError if a parameter of a sharded model is neither sharded nor ignored."""
    for name, param in module.named_parameters():
        if box_of(param) is None and not is_ignored(param):
            if in_functional_call():
                raise RuntimeError(functional_call(name))
            raise RuntimeError(
                f"parameter {name} was added or replaced after fully_shard: no rank would shard it or reduce its gradient; "
                "change the model before fully_shard, or keep the parameter out of the model"
            )


class Tree:
    """The parts of a module. `check()` runs before each forward and must be fast: 20 us for a hundred modules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.take()

    def take(self) -> None:
        """Record the current parts. RuntimeError if one of their parameters is neither sharded nor ignored."""
        check_added(self.module)
        modules = list(self.module.modules())
        self._children = [(part._modules, tuple(part._modules.values())) for part in modules]
        self._counts = [(part._parameters, len(part._parameters)) for part in modules]
        self._absent = [
            (part._parameters, name) for part in modules for name, p in part._parameters.items() if p is None
        ]

    def check(self) -> None:
        """RuntimeError if parameters were added. Parts without parameters may be added, and any part may be removed."""
        if (
            any(tuple(now.values()) != before for now, before in self._children)
            or any(len(now) != before for now, before in self._counts)
            or any(now.get(name) is not None for now, name in self._absent)
        ):
            self.take()
