"""The agreement of the ranks of a save on its tensors and its arguments: one gather compares a digest.

Before, each rank has checked its own tensors and arguments, without other ranks.
"""

import socket
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from ckpt.format.boxes import Box, cover_error
from ckpt.ranks import Ranks
from ckpt.saving.placement import Files
from ckpt.tensors import Description, Local


class Arguments(NamedTuple):
    """The arguments of `save` that must be the same on all ranks. `path`: not resolved, since nodes may differ in the real path."""

    path: str
    files: Files
    driver: str
    background: bool
    keep: int | None
    keep_every: int | None
    overwrite: bool
    private: bool


class Agreed(NamedTuple):
    """The contents of a save of all ranks. `boxes`: for each rank, by name, its non-empty boxes of the tensors that are cut.

    `scalars`: the values of the 0-D tensors. `hosts`: the node of each rank.
    """

    tensors: list[Description]
    boxes: list[dict[str, list[Box]]]
    scalars: dict[str, bytes]
    hosts: list[str]


def agree(held: list[Local], arguments: Arguments, comm: Ranks, doing: str) -> Agreed:
    """Check that the ranks save the same tensors with the same arguments, and that their boxes cover the tensors. Collective.

    ValueError on all ranks, with the argument or tensor that differs; in checked mode also with an array that has other values on
    another rank. `doing`: the name of the call in the error.
    """
    said = {local.name: local.description for local in held}
    cut = [local for local in held if local.boxes and not local.whole]
    boxes = {local.name: [part.box for part in local.boxes] for local in cut}
    # HDF5 cannot make a scalar virtual: the index, which rank 0 writes, has its value.
    scalars = {local.name: local.boxes[0].array.tobytes() for local in cut if not local.boxes[0].box.shape}
    digest = xxhash.xxh3_128_hexdigest(repr(arguments).encode() + msgspec.json.encode(said))
    gathered = comm.all_gather_object((digest, boxes, scalars, socket.gethostname()))
    all_boxes = [boxes for _, boxes, *_ in gathered]
    everyone: Sequence[Said] = [said]
    problem: str | None = None
    if len({digest for digest, *_ in gathered}) > 1:
        all_arguments, everyone = zip(*comm.all_gather_object((arguments, said)), strict=True)
        problem = _argument_difference(all_arguments)
    # The description of each tensor by the first rank that has one.
    tensors = {name: one for theirs in reversed(everyone) for name, one in theirs.items() if one is not None}
    if len(everyone) > 1 or len(tensors) < len(said):
        problem = problem or _tensor_difference(everyone, tensors)
    if problem is None and getattr(comm, "checked", False):
        problem = _value_difference(held, comm)
    # All ranks find the same problem without messages; `together` makes one error of it.
    if problem := problem or _cover_problem(tensors.values(), all_boxes):
        with comm.together(doing):
            raise ValueError(problem)
    values = {part.name: part.boxes[0].array.tobytes() for part in held if part.whole and not tensors[part.name].shape}
    for _, _, theirs, _ in gathered:
        values |= theirs
    return Agreed([tensors[name] for name in said], all_boxes, values, [host for *_, host in gathered])


def _argument_difference(everyone: Sequence[Arguments]) -> str | None:
    """A message about the first argument that differs between ranks, or None."""
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(Arguments._fields, everyone[0], theirs, strict=True):
            if repr(first) != repr(other):  # as in the digest
                return f"{name} is {first!r} on rank 0, but {other!r} on rank {rank}; expected the same on all ranks"
    return None


Said = dict[str, Description | None]
"""The description of each tensor by one rank. None: the rank passes an empty list, which has no description."""


def _tensor_difference(everyone: Sequence[Said], known: Mapping[str, Description]) -> str | None:
    """A message about the first tensor that differs between ranks, or None. `known`: the descriptions in `everyone`, by name."""
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in sorted(first.keys() | theirs.keys()):
            if name not in theirs or name not in first:
                has, lacks = (0, rank) if name in first else (rank, 0)
                return f"the ranks save different tensors: rank {has} has {name!r}, rank {lacks} has not"
            if name not in known:
                return f"tensor {name!r} is an empty list on all ranks, without a shape; expected a Shard of it on one of them"
            said, expected = theirs[name], known[name]
            if said != expected and (said is not None or expected.whole):
                teller = next(rank for rank, theirs in enumerate(everyone) if theirs[name] is not None)
                return (
                    f"the ranks save different tensors: {name!r} is {expected} on rank {teller}, "
                    f"but {said or 'an empty list of shards'} on rank {rank}"
                )
    return None


def _value_difference(held: list[Local], comm: Ranks) -> str | None:
    """A message about the first array that has other values on another rank, or None. Collective; for checked mode."""
    digests = {
        local.name: [xxhash.xxh3_128_hexdigest(part.array.reshape(-1).view(np.uint8).data) for part in local.boxes]
        for local in held
        if local.whole
    }
    first, *others = comm.all_gather_object(digests)
    for rank, theirs in enumerate(others, 1):
        for name, digest in theirs.items():
            if digest != first[name]:
                return f"tensor {name!r} has other values on rank {rank} than on rank 0; expected an array that all have, or Shards"
    return None


def _cover_problem(tensors: Collection[Description], boxes: Sequence[Mapping[str, Sequence[Box]]]) -> str | None:
    """A message about a tensor that the ranks' boxes do not cover exactly, or None."""
    found: dict[str, list[Box]] = {}
    for theirs in boxes:
        for name, held in theirs.items():
            found.setdefault(name, []).extend(held)
    for tensor in tensors:
        if tensor.whole:
            continue
        if problem := cover_error(tensor.shape, found.get(tensor.name, ()), partial(_owner, boxes, tensor.name)):
            alone = "; ranks that save one checkpoint together pass comm=collectives.world()" if len(boxes) == 1 else ""
            return f"tensor {tensor.name!r}: {problem}{alone}"
    return None


def _owner(boxes: Sequence[Mapping[str, Sequence[Box]]], name: str, number: int) -> str:
    """The rank that holds box `number` of the tensor in the count of `_cover_problem`."""
    return f"rank {[rank for rank, theirs in enumerate(boxes) for _ in theirs.get(name, ())][number]}"
