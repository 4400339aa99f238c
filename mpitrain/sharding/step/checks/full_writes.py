"""An error for a forward that writes parameters: a momentum encoder, a codebook, an embedding with `max_norm`.

In a forward the modules show full parameters. What a write to one would do depends on the storage: the ranks of a node would write to
the same memory one after the other, gathered memory is freed, and a copy of each rank would differ from the others. So it is an error
with each storage and on any number of ranks. A write through `param.data` is seen in first forwards alone, by watch.py.
"""

from collections.abc import Iterable, Sequence

import torch

from mpitrain.sharding.setup.readiness import some
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_glue.torch_internals import writes_to_each


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
