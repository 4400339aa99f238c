"""What the ranks of a save must mean alike, its tensors and its arguments, and how they find out: in one gather, by a digest.

What each rank can check by itself was checked before; nothing there may depend on another rank.
"""

import socket
from typing import NamedTuple

import xxhash

from ckpt.format.boxes import Box, cover_error
from ckpt.ranks import Ranks
from ckpt.saving.placement import Files
from ckpt.tensors import Local


class Arguments(NamedTuple):
    """Those of `save` that are the same on all ranks. `path`: as it was given, for nodes may see a folder under several names."""

    path: str
    files: Files
    driver: str
    background: bool
    keep: int | None
    keep_every: int | None
    overwrite: bool


def agree(held: list[Local], arguments: Arguments, comm: Ranks, doing: str) -> tuple[list[dict[str, Box]], list[str]]:
    """Each rank's filled boxes of sharded tensors and its node, after a check that all ranks mean the same and cover the tensors.

    Collective. ValueError on all ranks, `doing` what: which argument or tensor it is, and how it differs.
    """
    descriptions = [local.description for local in held]
    boxes = {local.name: local.box for local in held if not local.whole and local.box.size}
    digest = xxhash.xxh3_128_hexdigest(repr((arguments, descriptions)).encode())
    gathered = comm.all_gather_object((digest, boxes, socket.gethostname()))
    if len({digest for digest, *_ in gathered}) > 1:
        everyone = comm.all_gather_object((arguments, descriptions))
        with comm.together(doing):
            raise ValueError(
                _argument_difference([arguments for arguments, _ in everyone])
                or _tensor_difference([descriptions for _, descriptions in everyone])
            )
    all_boxes = [boxes for _, boxes, _ in gathered]
    for local in held:
        if not local.whole:
            found = {
                f"rank {rank}": theirs[local.name] for rank, theirs in enumerate(all_boxes) if local.name in theirs
            }
            if problem := cover_error(local.shape, list(found.values()), list(found).__getitem__):
                if comm.size == 1:
                    problem += "; ranks that save one checkpoint together pass comm=collectives.world()"
                # All ranks find the same, so that nobody has to tell the others; but it is to be raised as one.
                with comm.together(doing):
                    raise ValueError(f"tensor {local.name!r}: {problem}")
    return all_boxes, [host for *_, host in gathered]


def _argument_difference(everyone: list[Arguments]) -> str | None:
    """In which argument the ranks differ first, or None."""
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(Arguments._fields, everyone[0], theirs, strict=True):
            if repr(first) != repr(other):  # as in the digest
                return f"{name} is {first!r} on rank 0, but {other!r} on rank {rank}; expected the same on all ranks"
    return None


def _tensor_difference(everyone: list[list[tuple]]) -> str:
    """A line that says in what the ranks' tensors differ first."""
    first = {name: rest for name, *rest in everyone[0]}
    for rank, theirs in enumerate(everyone):
        other = {name: rest for name, *rest in theirs}
        for name in sorted(first.keys() | other.keys()):
            if name not in other or name not in first:
                has, lacks = (0, rank) if name in first else (rank, 0)
                return f"the ranks save different tensors: rank {has} has {name!r}, rank {lacks} has not"
            if first[name] != other[name]:
                kinds = [
                    f"{dtype} {shape}" + ("" if whole else " in shards") + (f" along {axes}" if axes else "")
                    for dtype, shape, whole, axes in (first[name], other[name])
                ]
                return (
                    f"the ranks save different tensors: {name!r} is {kinds[0]} on rank 0, but {kinds[1]} on rank {rank}"
                )
    raise AssertionError("the digests differ, what they are made of does not")
