"""A corpus in the shared memory of a node: read once, seen by all ranks of the node."""

from typing import NamedTuple

import numpy as np

from collectives import Communicator
from mpitrain.config import DataConfig
from mpitrain.data.corpus import Part, read_into, scan
from mpitrain.rank0 import on_rank0


class Corpus(NamedTuple):
    """Tokens are bytes: 1-D uint8, shared by the ranks of a node, which must not write to them."""

    train: np.ndarray
    heldout: np.ndarray
    num_files: int
    fingerprint: str  # hash of names, sizes and split


def load_corpus(config: DataConfig, comm: Communicator) -> Corpus:
    """List the files on rank 0, read them on one rank of each node. Collective; ValueError on all ranks if that fails."""
    listing = on_rank0(comm, lambda: scan(config.path, config.suffixes, config.heldout))

    def read(part: Part) -> np.ndarray:
        tokens = comm.node.shared(part.num_tokens, np.uint8)
        with comm.together():
            if comm.node.rank == 0:
                read_into(part, tokens)
        return tokens

    num_files = len({piece.path for part in (listing.train, listing.heldout) for piece in part.pieces})
    return Corpus(read(listing.train), read(listing.heldout), num_files, listing.fingerprint)
