"""A unit: parameters of one dtype in one flat buffer, cut into a shard for each rank.

[Note: kinds of tensors]
- shard: this rank's rows of a parameter, an `nn.Parameter` that the optimizer steps; what `model.parameters()` shows when idle.
- full: the whole parameter, another `nn.Parameter` that forward and backward use, shown only then. Both live as long as the unit.
- full buffer: the full parameters end to end (unsharding.py).
- gradient buffer: full gradients of one unit, gathered up for the reduction; the shards' gradients come out of it (gradients.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collectives import Communicator
from mpitrain.sharding.setup.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.gradients import Gradients, where_shards_live
from mpitrain.sharding.unit.layout import Box, rows_of
from mpitrain.sharding.unit.ranks import Ranks
from mpitrain.sharding.unit.rows import guard_shard
from mpitrain.sharding.unit.unsharding import Shapes, Storage


@dataclass
class Sharded:
    """One parameter: its first name in the module it was sharded with, everyone who uses it, its two faces, this rank's box."""

    name: str
    users: list[tuple[nn.Module, str]]  # several for tied weights
    full: nn.Parameter
    shard: nn.Parameter
    box: Box
    from_meta: bool = False  # made without values
    grad: torch.Tensor | None = None  # where the shard's gradient is reduced to
    had_grad: bool = False  # on this rank, when it was last reduced
    was_fresh: bool = False  # its shard had no gradient left from before

    def __post_init__(self) -> None:
        self._memory = self.shard.data_ptr(), self.shard.dtype

    @property
    def lacks_values(self) -> bool:
        """Whether nobody has written to this rank's rows, which were made without values."""
        return self.from_meta and self.shard.numel() > 0 and self.shard._version == 0

    def check(self, shown: nn.Parameter | None) -> None:
        """RuntimeError if somebody has put another parameter in its place, or other memory behind it, which would be lost."""
        if (self.shard.data_ptr(), self.shard.dtype) != self._memory:
            raise RuntimeError(
                f"the memory of parameter {self.name} was replaced after fully_shard (by param.data = ..., or by casting or moving a "
                "part of the model), and its new values would be lost; write into it instead (with no_grad: param.copy_(...))"
            )
        if shown is not self.shard and shown is not self.full:
            raise RuntimeError(
                f"parameter {self.name} was replaced after fully_shard, and neither its shards nor its gradient would follow; "
                "replace parameters before fully_shard, or write new values into the shard (with no_grad: param.copy_(...))"
            )


class Unit:
    """Parameters of one dtype and, at first, one `requires_grad`, sharded over `ranks` together. Made on all ranks alike.

    `params`: (name, users, parameter) of each. Values come from rank 0; on the meta device they are left to `mpitrain.initialize`
    or a checkpoint. `store(shapes, dtype)`: makes the Storage of the full parameters.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]],
        ranks: Ranks,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        store: Callable[[Shapes, torch.dtype], Storage],
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        originals = [param for _, _, param in params]
        self.ranks = ranks
        self.device = device
        self.on_host = device.type == "cpu"
        self.dtype = originals[0].dtype
        is_trained = originals[0].requires_grad
        self.full_dtype, self.reduce_dtype = policy.dtypes_of(self.dtype)
        comm = ranks.shard
        self.storage = store([tuple(p.shape) for p in originals], self.full_dtype)
        self.layout = self.storage.layout
        self.count = self.layout.counts[comm.rank]
        first = self.layout.bounds[comm.rank]

        self.offload = offload if offload is not None and offload.parts(device) else None
        self.adopts = ranks.all.size == 1
        """Whether the full gradients become the shards', cast and moved at most: those of one rank alone."""
        self.storage.in_place = self.storage.lasts and self.full_dtype == self.dtype and self.offload is None
        if self.storage.in_place:
            self._shard = self.storage.part(first, first + self.count)
        else:
            self._shard = where_shards_live(self.count, self.dtype, device, self.offload)

        self.params: list[Sharded] = []
        for index, (name, users, original) in enumerate(params):
            box, place = self.layout.box(index, comm.rank), self.layout.places[index]
            whole = self.storage.part(place.start, place.stop)
            begin = box.start - first
            rows = self._shard[begin : begin + box.numel]
            full = nn.Parameter(whole.view(original.shape), requires_grad=is_trained)
            # A version counter of its own, as `Storage.part` gives it.
            shard = nn.Parameter(rows.data.view(box.shape), requires_grad=is_trained)
            if not original.is_meta:
                _take_rows(shard, original, box, ranks.all)
            shard.shard_box = full.shard_box = box  # type: ignore[attr-defined]
            if comm.size > 1:
                guard_shard(shard)
            self.params.append(Sharded(name, users, full, shard, box, original.is_meta))
        # Who sees a parameter where: short, since all of a model change faces twice a step and more.
        self._faces = [(module._parameters, name, param) for param in self.params for module, name in param.users]
        self._fulls = tuple(param.full for param in self.params)
        self.gradients = [Gradients(self, range(len(params)))] if is_trained else []
        """Those that are reduced: of the parameters trained from the start, and of those thawed later, at one time each."""
        self._is_withdrawn = False
        self.release()
        self.show_shards()

    # Full parameters

    def show_full(self) -> None:
        """Let the modules see the full parameters."""
        for seen, name, param in self._faces:
            param.check(seen.get(name))
            if param.shard._backward_hooks:
                raise RuntimeError(
                    f"parameter {param.name} has a hook by register_hook, which would never run: the shard is no part of the graph; "
                    "use register_post_accumulate_grad_hook, which runs at the end of a backward"
                )
            if param.full.requires_grad != param.shard.requires_grad:  # the user has frozen or thawed it
                param.full.requires_grad_(param.shard.requires_grad)
            seen[name] = param.full

    def check_owners(self) -> None:
        """RuntimeError if a module has something else in place of one of the parameters."""
        for seen, name, param in self._faces:
            param.check(seen.get(name))

    def show_shards(self) -> None:
        """Let the modules see the shards."""
        for seen, name, param in self._faces:
            seen[name] = param.shard

    @property
    def needs_refresh(self) -> bool:
        """Whether full parameters last and have to be brought up to date."""
        return self.storage.needs_refresh

    def refresh(self, *, ahead: bool = False) -> None:
        """Bring lasting full parameters up to date with the shards, `ahead` by the time of `finish_refresh`. Collective."""
        self.storage.refresh(self._shard, ahead=ahead)

    def finish_refresh(self) -> None:
        """Wait until a refresh that was begun has ended."""
        self.storage.finish()

    def gather(self) -> bool:
        """Fill full parameters that do not last. Collective where they are not full. Returns whether they were not."""
        gathered = self.storage.gather(self._shard)
        if self._is_withdrawn:
            self._is_withdrawn = False
            torch._C._autograd._unsafe_set_version_counter(
                self._fulls, tuple(full._version - 1 for full in self._fulls)
            )
        return gathered

    def begin_gather(self) -> None:
        """Begin to fill the empty full parameters: `gather` ends it. Collective."""
        self.storage.begin_gather(self._shard)

    def release(self, *, for_backward: bool = False) -> None:
        """Give the memory back of full parameters that do not last. `for_backward`: see Storage."""
        self.storage.release(for_backward=for_backward)
        if not (self.storage.lasts or self._is_withdrawn):
            # A backward that came to them now, by a way that nobody watches, would compute with no memory behind them. As long as
            # they are not gathered again, autograd takes them for changed, and raises.
            self._is_withdrawn = True
            torch.autograd.graph.increment_version(self._fulls)

    # Gradients

    @property
    def trained(self) -> bool:
        """Whether gradients of some parameters are reduced."""
        return bool(self.gradients)

    @property
    def frozen(self) -> list[int]:
        """The parameters whose gradients are not reduced."""
        grouped = {id(param) for group in self.gradients for param in group.params}
        return [index for index, param in enumerate(self.params) if id(param) not in grouped]

    def thaw(self, indices: Sequence[int]) -> None:
        """From now on reduce the gradients of these parameters, which were frozen. All ranks alike."""
        for index in indices:
            self.params[index].full.requires_grad_(True)
        self.gradients.append(Gradients(self, indices))

    @property
    def has_full_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        return any(group.has_placed for group in self.gradients) or any(full.grad is not None for full in self._fulls)

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        for group in self.gradients:
            group.forget_placed()
        for full in self._fulls:
            full.grad = None


def _take_rows(shard: nn.Parameter, original: nn.Parameter, box: Box, comm: Communicator) -> None:
    """Fill a shard from rank 0's parameter, so that models made from different seeds do not become a mixture. Collective."""
    with torch.no_grad():
        values = original.detach().resolve_conj().contiguous()
        comm.broadcast(values)
        shard.copy_(rows_of(values, box))
