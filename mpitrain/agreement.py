"""A check that all ranks describe the same thing. Otherwise they would wait for each other, or mix two models."""

import hashlib
from collections.abc import Sequence

from collectives import Communicator


def check_alike(comm: Communicator, mine: Sequence[str], *, caller: str, remedy: str) -> None:
    """ValueError on all ranks, with the first difference, if the ranks have other lines. Collective: 16 bytes per rank."""
    if comm.size == 1:
        return
    digests = comm.all_gather_object(hashlib.blake2b("\n".join(mine).encode(), digest_size=16).digest())
    if len(set(digests)) == 1:
        return
    theirs = comm.all_gather_object(list(mine))
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = theirs[0], theirs[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    said = [lines[at] if at < len(lines) else "nothing more" for lines in (first, other)]
    raise ValueError(f"{caller}: the ranks differ: {said[0]} on rank 0, {said[1]} on rank {rank}; {remedy}")
