"""Collectives of ranks on different nodes that send fp32 elements in a smaller format (collectives/codec).

Every rank owns one part of a sum. It gets the other ranks' contributions to this part directly from them, each encoded once, and adds
their decoded values in fp32, in order of rank. Encoded values are never added, because int8 numbers with different scales have no
sum. A ring would encode each partial sum again, with another error. The result travels in the same way: its owner encodes it once, and
uses its decoded values too. So all ranks hold the same bits. ZeRO++ (Wang et al., 2023) reduces in the same way.

"avg" divides each sum by the number of its addends before the sum is encoded: two-level collectives divide the sum of a node by its
ranks, and the sum of the nodes by their number. So all encoded numbers have the magnitude of one rank's elements, and fp16 does not
overflow where the average fits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.dtypes import DType, dtype_of
from collectives.arrays.reduction import copy, divide, reduce_into
from collectives.codec.coding import decode, decode_add, encode
from collectives.codec.formats import BLOCK, FORMATS
from collectives.transports.overlap import Bounds, Chunk, overlap
from collectives.transports.segments import SEGMENT_BYTES
from collectives.transports.traffic import to_other_nodes
from collectives.transports.transport import even_parts, parts

_TAG = 16  # of lane 0; the executor's tags are lower, those of `Messages` begin at 256


class Encoded:
    """all_reduce, reduce_scatter and all_gather of the ranks of `mpi`, all on different nodes. `wire`: the name of the format.

    Reductions take fp32 and the ops "sum" and "avg"; all_gather takes fp32, fp16 and bf16.
    """

    goes_in_rounds = True
    num_lanes = 3  # an all-reduce ends two chunks later; the memory of further lanes would be cold

    def __init__(self, mpi: Any, wire: str) -> None:
        self._mpi, self._rank, self._size = mpi, mpi.rank, mpi.size
        self._format = FORMATS[wire]
        self._peers = [rank for rank in range(mpi.size) if rank != mpi.rank]
        # Scratch memory by lane and use: new pages would cost more than the codec.
        self._kept: dict[tuple[int, str], np.ndarray] = {}

    def width(self, num_parts: int, dtype: DType) -> int:
        """The elements in a chunk of each of `num_parts` parts: whole blocks, about a segment of encoded bytes in all."""
        return max(SEGMENT_BYTES // (num_parts * self._format.itemsize) // BLOCK, 1) * BLOCK

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        def chunk(bounds: Bounds, lane: int) -> Chunk:
            return self.all_reduce_steps(flat[slice(*bounds[0])], op, dtype, lane), _nothing

        overlap(chunk, [(0, flat.size)], self.width(1, dtype), self.num_lanes)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        ranges = parts(counts)
        first = ranges[self._rank][0]

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            begin, end = bounds[self._rank]
            pieces = [flat[slice(*part)] for part in bounds]
            return self._reduce_steps(out[begin - first : end - first], pieces, op, dtype, lane), _nothing

        overlap(chunk, ranges, self.width(self._size, dtype), self.num_lanes)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        ranges = parts(counts)
        first = ranges[self._rank][0]

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            begin, end = bounds[self._rank]
            pieces = [out[slice(*part)] for part in bounds]
            return self._gather_steps(pieces, flat[begin - first : end - first], lane), _nothing

        overlap(chunk, ranges, self.width(self._size, dtype_of(flat.dtype)), self.num_lanes)

    # The same operations on one chunk, as generators that yield when a step's messages have started (see scheduled.py).

    def all_reduce_steps(self, flat: np.ndarray, op: str, dtype: DType, lane: int = 0) -> Iterator[None]:
        pieces = [flat[slice(*part)] for part in _parts_of_blocks(flat.size, self._size)]
        total = self._memory("total", pieces[self._rank].nbytes, lane).view(np.float32)
        yield from self._reduce_steps(total, pieces, op, dtype, lane)
        yield from self._gather_steps(pieces, total, lane)

    def reduce_scatter_steps(
        self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType, lane: int = 0
    ) -> Iterator[None]:
        return self._reduce_steps(out, [flat[slice(*part)] for part in parts(counts)], op, dtype, lane)

    def all_gather_steps(
        self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int], lane: int = 0
    ) -> Iterator[None]:
        return self._gather_steps([out[slice(*part)] for part in parts(counts)], flat, lane)

    def _reduce_steps(
        self, total: np.ndarray, pieces: Sequence[np.ndarray], op: str, dtype: DType, lane: int
    ) -> Iterator[None]:
        """`total` becomes the sum of all ranks' piece with this rank's number. `pieces`: by rank; `total` may be this rank's own."""
        mine = pieces[self._rank]
        arriving = self._receive([total.size] * self._size, lane)
        sent = self._room("sent", [pieces[peer].size for peer in self._peers], lane)
        sends = []
        for peer, data in zip(self._peers, sent, strict=True):
            encode(self._format, pieces[peer], data)
            sends.append(self._send(data, peer, lane))
        yield
        if self._rank > 0 and np.may_share_memory(total, mine):
            mine = mine.copy()  # the first contribution is written over it
        for rank, (request, data) in enumerate(arriving):
            if rank == self._rank:
                reduce_into(total, [total, mine] if rank else [mine], "sum", dtype)
            else:
                request.Wait()
                (decode_add if rank else decode)(self._format, data, total)
        MPI.Request.Waitall(sends)
        if op == "avg":
            divide(total, self._size, dtype)

    def _gather_steps(self, pieces: Sequence[np.ndarray], mine: np.ndarray, lane: int) -> Iterator[None]:
        """Each rank's piece becomes the decoded values of its `mine`, on all ranks. `mine` may be this rank's piece."""
        arriving = self._receive([piece.size for piece in pieces], lane)
        (sent,) = self._room("sent", [mine.size], lane)
        wide = mine if mine.dtype == np.float32 else self._memory("wide", 4 * mine.size, lane).view(np.float32)
        if wide is not mine:
            copy(wide, mine)
        encode(self._format, wide, sent)
        sends = [self._send(sent, peer, lane) for peer in self._peers]
        yield
        for rank, (request, data) in enumerate(arriving):
            request.Wait()
            piece, data = pieces[rank], sent if rank == self._rank else data
            wide = piece if piece.dtype == np.float32 else self._memory("wide", 4 * piece.size, lane).view(np.float32)
            decode(self._format, data, wide)
            if wide is not piece:
                copy(piece, wide)
        MPI.Request.Waitall(sends)

    # Messages and their memory

    def _receive(self, lengths: Sequence[int], lane: int) -> list[tuple[Any, np.ndarray]]:
        """The requests for the encoded elements of all ranks, `lengths[rank]` of each, and the memory that gets them."""
        lengths = [0 if rank == self._rank else length for rank, length in enumerate(lengths)]
        return [
            (self._mpi.Irecv([data, MPI.BYTE], rank, _TAG + lane) if data.size else MPI.REQUEST_NULL, data)
            for rank, data in enumerate(self._room("received", lengths, lane))
        ]

    def _send(self, data: np.ndarray, peer: int, lane: int) -> Any:
        to_other_nodes.add(data.nbytes)
        return self._mpi.Isend([data, MPI.BYTE], peer, _TAG + lane) if data.size else MPI.REQUEST_NULL

    def _room(self, use: str, lengths: Sequence[int], lane: int) -> list[np.ndarray]:
        """Memory for the encoded data of arrays of these lengths."""
        places = parts([self._format.nbytes(length) for length in lengths])
        memory = self._memory(use, places[-1][1], lane)
        return [memory[slice(*place)] for place in places]

    def _memory(self, use: str, nbytes: int, lane: int) -> np.ndarray:
        kept = self._kept.get((lane, use))
        if kept is None or kept.size < nbytes:
            kept = self._kept[lane, use] = np.empty(nbytes, np.uint8)
        return kept[:nbytes]


def _parts_of_blocks(length: int, num_parts: int) -> Bounds:
    """(begin, end) of parts of `length` elements that begin at multiples of a block, so that only the last block may be short."""
    blocks = even_parts(-(-length // BLOCK), num_parts)
    return [(begin * BLOCK, min(end * BLOCK, length)) for begin, end in blocks]


def _nothing() -> None:
    """The work after the messages of a chunk."""
