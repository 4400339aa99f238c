"""Parameters of one dtype in one flat buffer, cut into a shard for each rank.

[Note: kinds of tensors]
- shard: this rank's rows of a parameter, an `nn.Parameter` that the optimizer updates; `model.parameters()` shows it between steps.
- full parameter: another `nn.Parameter`, which forward and backward use. Shard and full parameter live as long as the unit.
- full buffer: the full parameters end to end (storage.py).
- gradient buffer: the full gradients end to end, from which a reduction makes the gradients of the shards (gradients.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ckpt.views import plain
from collectives import Communicator
from mpitrain.placement.marks import mark_shard, mark_spread
from mpitrain.placement.parts import ShardBox, mark_part, part_of
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.unit.gradients import Gradients, where_shards_live
from mpitrain.sharding.unit.layout import rows_of
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.storage import Storage
from mpitrain.torch_glue.torch_internals import hooks_on, outdate, restore, storage_of, with_own_counter


class FlatParameters:
    """Parameters of one dtype and, at first, one `requires_grad`, sharded over `ranks` together. All ranks make the same object.

    `params`: (name, users, parameter) of each. Values come from rank 0. Parameters on the meta device get values later, from
    `mpitrain.initialize` or a checkpoint. `storage`: the memory of the full parameters.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]],
        ranks: DataParallelRanks,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        storage: Storage,
        offload: CPUOffloadPolicy | None = None,
        slices: Slices | None = None,
    ) -> None:
        originals = [param for _, _, param in params]
        self.ranks, self._slices = ranks, slices
        self.device = device
        self.dtype = originals[0].dtype
        is_trained = originals[0].requires_grad
        self.full_dtype, self.reduce_dtype = policy.dtypes_of(self.dtype)
        comm = ranks.shard
        self.storage = storage
        self.layout = self.storage.layout
        count, first = self.layout.counts[comm.rank], self.layout.bounds[comm.rank]

        self.offload = offload if offload is not None and offload.parts(device) else None
        has_masters = self.full_dtype != self.dtype or self.offload is not None or ranks.wired.weights is not comm
        self.storage.in_place = self.storage.lasts and not has_masters
        if self.storage.in_place:
            self._shard = self.storage.part(first, first + count)
        else:
            self._shard = where_shards_live(count, self.dtype, device, self.offload).zero_()

        self.params: list[ShardedParameter] = []
        for index, (name, users, original) in enumerate(params):
            box, extent = self.layout.box(index, comm.rank), self.layout.extents[index]
            whole = self.storage.part(extent.start, extent.stop)
            begin = box.start - first
            rows = self._shard[begin : begin + box.numel]
            full = nn.Parameter(whole.view(original.shape), requires_grad=is_trained)
            shard = nn.Parameter(with_own_counter(rows).view(box.shape), requires_grad=is_trained)
            if not original.is_meta:
                _take_rows(shard, original, box, ranks.data_parallel)
            mark_shard(shard, box)
            mark_shard(full, box)
            is_cut = comm.size > 1 and original.numel() > 0
            if (part := part_of(original)) is not None:
                mark_part(shard, part)
                mark_part(full, part)
                is_cut = is_cut or part.is_cut
            mark_spread(
                shard, box.full_shape, name=name, everyone=ranks.everyone, holders=ranks.holders,
                alike=ranks.all_holders, offset=box.offset, is_ordered=slices is not None, is_cut=is_cut,
            )  # fmt: skip
            self.params.append(ShardedParameter(name, users, full, shard, box, ranks, original.is_meta))
        # Each place of a module that shows a parameter. One flat list, because each forward and backward changes all of them.
        self._shown = [(module._parameters, name, param) for param in self.params for module, name in param.users]
        self._fulls = tuple(param.full for param in self.params)
        self.gradients = [self._gradients_of(range(len(params)))] if is_trained else []
        """The gradients that are reduced: first those of the parameters trained from the start, then one entry for each thaw."""
        self.is_outdated = False
        self.is_filling = False  # so that the shards are read for the full parameters
        self.free()

    def _gradients_of(self, indices: Sequence[int]) -> Gradients:
        params, layout = [self.params[index] for index in indices], self.layout.only(indices)
        return Gradients(
            params, layout, self.ranks, self.device, self.dtype, self.reduce_dtype, self.offload, self._slices
        )

    # What the modules see

    def show_full(self) -> None:
        """Let the modules see the full parameters."""
        for seen, name, param in self._shown:
            param.check(seen.get(name))
            if hooks_on(param.shard):
                raise RuntimeError(
                    f"parameter {param.name} has a hook by register_hook, which would never run: the shard is not part of the graph; "
                    "use register_post_accumulate_grad_hook, which runs at the end of a backward"
                )
            if param.full.requires_grad != param.shard.requires_grad:  # the user has frozen or thawed the parameter
                param.full.requires_grad_(param.shard.requires_grad)
            seen[name] = param.full

    def show_shards(self) -> None:
        """Let the modules see the shards."""
        for seen, name, param in self._shown:
            seen[name] = param.shard

    def check_shown(self) -> None:
        """RuntimeError if a module shows another object in place of one of the parameters."""
        for seen, name, param in self._shown:
            param.check(seen.get(name))

    def show_copies(self) -> dict[ShardedParameter, nn.Parameter]:
        """Let the modules see new copies of the full parameters, with the values and the dtype of the masters. Collective."""
        buffer = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        with self._filling():
            self.ranks.shard.all_gather(buffer, self._shard.to(self.device), counts=self.layout.counts)
        copies = {}
        for param, extent in zip(self.params, self.layout.extents, strict=True):
            values = with_own_counter(buffer[extent.start : extent.stop]).view(param.full.shape)
            copies[param] = nn.Parameter(values, requires_grad=param.shard.requires_grad)
            mark_shard(copies[param], param.box)
        for seen, name, param in self._shown:
            param.check(seen.get(name))
            seen[name] = copies[param]
        return copies

    # The full parameters' values

    def begin_fill(self) -> None:
        """Begin to fill the full parameters from the shards, unless they are already full; `fill` waits for the end. Collective."""
        with self._filling():
            self.storage.begin_fill(self._shard)

    def fill(self) -> bool:
        """Fill the full parameters, unless they are already full. Returns whether it filled them; if so, the call is collective."""
        with self._filling():
            filled = self.storage.fill(self._shard)
        if self.is_outdated:
            self.is_outdated = False
            restore(self._fulls)
        return filled

    @contextmanager
    def _filling(self) -> Iterator[None]:
        self.is_filling = True
        try:
            yield
        finally:
            self.is_filling = False

    def free(self, *, for_backward: bool = False) -> None:
        """Free the full parameters, unless they stay in memory (`Storage.lasts`). `for_backward`: see `Gathered.free`."""
        if self.storage.free(for_backward=for_backward):
            self.put_back()
            self.storage.free(for_backward=for_backward)
        if not (self.storage.lasts or self.is_outdated):
            self.is_outdated = True
            outdate(self._fulls)

    def put_back(self) -> list[ShardedParameter]:
        """Give full parameters their memory back if it was replaced (by `param.data = ...`). Returns those parameters."""
        memory = storage_of(self.storage.full_buffer)
        moved = [
            (p, its) for p, its in zip(self.params, self.layout.extents, strict=True) if storage_of(p.full) != memory
        ]
        for param, extent in moved:
            param.full.data = self.storage.part(extent.start, extent.stop).view(extent.shape)
        return [param for param, _ in moved]

    # Gradients

    @property
    def frozen(self) -> list[int]:
        """The parameters whose gradients are not reduced."""
        reduced = {id(param) for gradients in self.gradients for param in gradients.params}
        return [index for index, param in enumerate(self.params) if id(param) not in reduced]

    def thaw(self, indices: Sequence[int]) -> None:
        """Reduce the gradients of these parameters, which were frozen, from now on. All ranks make the same call."""
        for index in indices:
            self.params[index].full.requires_grad_(True)
        self.gradients.append(self._gradients_of(indices))

    @property
    def has_full_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        return any(gradients.placed or gradients.waiting for gradients in self.gradients)

    def reset_grads(self) -> None:
        """Drop full gradients that were not reduced."""
        for gradients in self.gradients:
            gradients.placed.clear()
            gradients.waiting.reset()


def _take_rows(shard: nn.Parameter, original: nn.Parameter, box: ShardBox, comm: Communicator) -> None:
    """Fill a shard from rank 0's parameter: ranks with different seeds must not mix their models. Collective."""
    with torch.no_grad():
        values = plain(original.detach())
        comm.broadcast(values)
        shard.copy_(rows_of(values, box))
