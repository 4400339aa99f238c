"""Which boxes of a whole parameter a rank holds. Pure arithmetic on shapes, and one mark on the parameter itself.

A kind of parallelism that cuts a parameter (tensor, experts) replaces it by a smaller one and marks the new parameter with a
`ParameterPart`. A pipeline, whose stages have different parameters, marks them too.
Sharding, initial values, norms and checkpoints read the mark, so each of them works on any layout and knows no kind of parallelism.
A parameter without a mark is whole, and belongs to one data-parallel group.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn

from collectives import Communicator


class Box(NamedTuple):
    """`shape` elements at `offset` of a whole parameter."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class ShardBox(NamedTuple):
    """A rank's part of a parameter: `shape` at `offset` in the full `full_shape`; elements `start`, ... of the flat buffer."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class ParameterPiece(NamedTuple):
    """`box` of a whole parameter, which is at the indices `place` of the tensor that has it."""

    place: tuple[slice, ...]
    box: Box


@dataclass(eq=False)
class ParameterPart:
    """A rank's part of a parameter: `boxes` of the whole of `full_shape`, end to end along dimension `dim`.

    The boxes differ along `dim` alone. `over`: the ranks whose parts make the whole. `copies`: the ranks of `over` that hold these same
    boxes, None if only this rank does. `is_partial`: each of the `copies` computes a part of the gradient, and the gradient is the sum.
    `stages`: the ranks of a pipeline, of which only those of `tied` have the parameter; None: only this rank, or no pipeline. `stage`:
    the first stage of this rank that has it.
    """

    full_shape: tuple[int, ...]
    dim: int
    boxes: tuple[Box, ...]
    over: Communicator
    copies: Communicator | None = None
    is_partial: bool = False
    stages: Communicator | None = None
    tied: Communicator | None = None
    stage: int | None = None
    seconds: float = 0.0
    """The time of all sums of gradients so far, with the waits for other ranks. On GPUs it is the time to start them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter on this rank."""
        length = sum(box.shape[self.dim] for box in self.boxes) if self.full_shape else 0
        return tuple(length if d == self.dim else n for d, n in enumerate(self.full_shape))

    @property
    def is_cut(self) -> bool:
        """Whether the ranks of `over` hold different parts: the same on all ranks, also on one whose part has all elements."""
        return self.copies is None or self.copies.size < self.over.size

    @property
    def is_in_stages(self) -> bool:
        """Whether other ranks have other parameters: the stages of a pipeline."""
        return self.stages is not None and self.stages.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one among those with the same part that saves it and counts in norms."""
        return all(comm is None or comm.rank == 0 for comm in (self.copies, self.tied))

    @property
    def model_ranks(self) -> Communicator:
        """The ranks that hold the model, if it is cut or in stages, and not both."""
        return self.over if self.stages is None or self.over.size > 1 else self.stages

    @property
    def needs_sum(self) -> bool:
        """Whether the gradient is a sum over several ranks."""
        return self.is_partial and self.copies is not None and self.copies.size > 1

    def take(self, whole: Any) -> Any:
        """The part of a whole tensor (torch). A view if the part is one box."""
        import torch

        boxes = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in self.boxes]
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes, self.dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterPart":
        """The part itself: a copy of a model is on the same ranks."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()

    def within(self, offset: Sequence[int], shape: Sequence[int]) -> list[ParameterPiece]:
        """The pieces of a box of the part (such as ZeRO's rows of it), with places in this box. Empty pieces are left out."""
        found: list[ParameterPiece] = []
        at = 0  # of the part, along `dim`
        for box in self.boxes if self.full_shape else ():
            length = box.shape[self.dim]
            begin = min(max(offset[self.dim] - at, 0), length)
            end = min(max(offset[self.dim] + shape[self.dim] - at, begin), length)
            if end > begin and all(n for d, n in enumerate(shape) if d != self.dim):
                first = at + begin - offset[self.dim]
                place = tuple(
                    slice(first, first + end - begin) if d == self.dim else slice(None) for d in range(len(shape))
                )
                where = tuple(box.offset[d] + (begin if d == self.dim else offset[d]) for d in range(len(shape)))
                size = tuple(end - begin if d == self.dim else n for d, n in enumerate(shape))
                found.append(ParameterPiece(place, Box(where, size)))
            at += length
        return found


def whole(shape: Sequence[int], over: Communicator, *, is_partial: bool) -> ParameterPart:
    """The part of a parameter that all ranks of `over` hold whole. `is_partial`: see `ParameterPart`."""
    box = Box((0,) * len(shape), tuple(shape))
    return ParameterPart(tuple(shape), 0, (box,), over, copies=over, is_partial=is_partial)


def row_dim(shape: Sequence[int]) -> int:
    """The dimension between whose rows a tensor may be sharded: the first that is longer than 1."""
    return next((d for d, length in enumerate(shape) if length > 1), 0)


def bounds(length: int, size: int, blocks: int | None = None) -> list[int]:
    """Where each of `size` parts of `length` elements begins, and the end. `blocks`: equal blocks that stay whole; None: elements."""
    count = blocks or max(length, 1)
    return [count * number // size * (length // count) for number in range(size + 1)]


def cut(
    shape: Sequence[int],
    dim: int,
    over: Communicator,
    *,
    lengths: Sequence[int] | None = None,
    blocks: int | None = None,
    copies: Communicator | None = None,
) -> ParameterPart:
    """This rank's part of a parameter that is cut along `dim` over the ranks of `over`, as equally as possible.

    `lengths`: of several matrices that lie end to end along `dim` (query, key and value of one product), each of which is cut.
    `blocks`: the number of equal blocks of each matrix (heads) that stay whole; None: single elements. `copies`: neighbouring ranks of
    `over` that get the same part, and each compute a part of its gradient.
    """
    shape, boxes, at = tuple(shape), [], 0
    num_sharing = 1 if copies is None else copies.size
    number, size = over.rank // num_sharing, over.size // num_sharing
    for length in (shape[dim],) if lengths is None else lengths:
        begin, end = bounds(length, size, blocks)[number : number + 2]
        offset = tuple(at + begin if d == dim else 0 for d in range(len(shape)))
        boxes.append(Box(offset, tuple(end - begin if d == dim else n for d, n in enumerate(shape))))
        at += length
    return ParameterPart(shape, dim, tuple(boxes), over, copies, is_partial=copies is not None)


def refuse_pickle() -> NoReturn:
    """TypeError for a pickle of a model that is cut or in stages, and so holds this rank's parts and communicators."""
    raise TypeError(
        "a model that tensor_parallel has cut, or pipeline has divided, cannot be pickled: this rank has only its parts; use "
        "mpitrain.save, or pickle mpitrain.full_state_dict(model)"
    )


def mark_part(param: Any, part: ParameterPart) -> None:
    """`param` is this rank's part of a whole parameter."""
    param.part_of_whole = part


def part_of(param: Any) -> ParameterPart | None:
    """This rank's part; None for a parameter that is whole on a rank of its data-parallel group."""
    return getattr(param, "part_of_whole", None)


def watch_gradient(param: Any) -> None:
    """Add up the copies' gradients of a marked parameter, if each is a part of a sum: when autograd has computed one, and before it is
    accumulated. `fully_shard` adds up those of a unit together instead, before it reduces them."""
    part = part_of(param)
    if part is not None and part.needs_sum:

        def added(grad: Any) -> Any:
            if grad is None:  # a backward that leaves it for later
                return None
            total = grad.contiguous().clone()
            add_gradients([(part, total)])
            return total

        is_trained = param.requires_grad
        param.requires_grad_(
            True
        )  # torch takes hooks of trained parameters alone, and keeps them while a parameter is frozen
        param.register_hook(added)
        param.requires_grad_(is_trained)


def add_gradients(grads: Sequence[tuple[ParameterPart, Any]]) -> None:
    """Add up the copies' gradients (torch) of several parts that need it, in place. Collective over the copies of each part.

    The gradients of the same copies are reduced together: they are few numbers each, and every reduction waits for the slowest rank.
    """
    import torch

    of_copies: dict[Communicator, list[tuple[ParameterPart, Any]]] = {}
    for part, grad in grads:
        assert part.copies is not None
        of_copies.setdefault(part.copies, []).append((part, grad))
    for copies, group in of_copies.items():
        began = time.perf_counter()
        if len(group) == 1 and group[0][1].is_contiguous():
            copies.all_reduce(group[0][1])
        else:
            total = copies.all_reduce(torch.cat([grad.reshape(-1) for _, grad in group]))
            for (_, grad), of_grad in zip(group, total.split([grad.numel() for _, grad in group]), strict=True):
                grad.copy_(of_grad.view(grad.shape))
        group[0][0].seconds += time.perf_counter() - began


def stages_of(params: Iterable[Any]) -> Communicator | None:
    """The ranks of the pipeline whose stages have these parameters; None for a model that is not in stages."""
    return next((part.stages for param in params if (part := part_of(param)) is not None), None)


def tensor_ranks_of(params: Iterable[Any]) -> Communicator | None:
    """The ranks among which `tensor_parallel` has cut a model with these parameters; None for a model that is not cut."""
    return next((part.over for param in params if (part := part_of(param)) is not None), None)


def mark_input(module: Any, comm: Communicator) -> None:
    """All ranks of `comm` call `module` with the same stream of activations."""
    module.ranks_with_input = comm


def mark_stage(module: Any, stage: int) -> None:
    """A stage of a pipeline has `module`."""
    module.stage_of_pipeline = stage


def mark_stack(module: Any) -> None:
    """`module` holds the blocks that a pipeline divides: a stack, however few of them this rank has."""
    module.is_stack_of_pipeline = True


def is_stack(module: Any) -> bool:
    """Whether a pipeline divides the blocks in `module`."""
    return getattr(module, "is_stack_of_pipeline", False)


def stage_of(module: Any) -> int | None:
    """The stage of this rank that has a module, the first one if several have it; None without a pipeline."""
    return getattr(module, "stage_of_pipeline", None)


def ranks_with_input(module: Any) -> Communicator | None:
    """The ranks that call a module with the same stream of activations; None if this rank alone has it, as far as is known."""
    return getattr(module, "ranks_with_input", None)
