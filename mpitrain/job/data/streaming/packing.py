"""Rows of tokens from the documents of a lane.

    cut       documents end to end, cut where a row is full: the rest begins the next row. Nothing is wasted.
    whole     documents that fit into a row stay whole: of 16 rows' documents, the longest first, each goes to the row that it fills
              best (best-fit decreasing, as in Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024). Padding fills
              the rest.

A row has one token more than the model sees, the last target. `segments` numbers the documents in the row; padding is -1.
"""

from bisect import bisect_left
from typing import Literal, NamedTuple

import numpy as np

from mpitrain.job.data.order import keys_of, permute
from mpitrain.job.data.streaming.feed import CHUNK, DOCUMENT, OFFSET, Cursor

Packing = Literal["cut", "whole"]
_GROUP_ROWS = 16


class PackedRow(NamedTuple):
    """Tokens and segments, int32 of the same length."""

    tokens: np.ndarray
    segments: np.ndarray


class CutRows:
    """Rows of `length` tokens, without padding."""

    def __init__(self, cursor: Cursor, length: int) -> None:
        self._cursor, self._length = cursor, length

    def next(self) -> PackedRow:
        """The next row. Its first token was the last target of the row before, unless that was the end of a document."""
        row = PackedRow(np.empty(self._length, np.int32), np.empty(self._length, np.int32))
        at, segment, state = 0, 0, self._cursor.state
        while at < self._length:
            tokens, offset = self._cursor.tokens(), int(state[OFFSET])
            if offset >= len(tokens):
                raise _nowhere(state)
            count = min(len(tokens) - offset, self._length - at)
            row.tokens[at : at + count] = tokens[offset : offset + count]
            row.segments[at : at + count] = segment
            at += count
            if offset + count == len(tokens):
                self._cursor.next_document()
                segment += 1
            else:
                state[OFFSET] = offset + count - (at == self._length)
        return row


class WholeRows:
    """Rows of `length` tokens, with padding. A longer document is several pieces.

    The state of the cursor is at the first document of a group, and its offset is the number of the group's rows so far. A group is the
    documents for 16 rows, or the rest of a chunk.
    """

    def __init__(self, cursor: Cursor, length: int, *, seed: int) -> None:
        self._cursor, self._length, self._seed = cursor, length, seed
        self._rows: list[PackedRow] = []
        self._after = cursor.state  # the state after the group

    def next(self) -> PackedRow:
        """The next row."""
        state = self._cursor.state
        if not self._rows:
            self._rows, self._after = self._group(taken=int(state[OFFSET]))
            if state[OFFSET] >= len(self._rows):
                raise _nowhere(state)
        row = self._rows[int(state[OFFSET])]
        state[OFFSET] += 1
        if state[OFFSET] == len(self._rows):
            self._cursor.go_to(self._after)
            self._rows = []
        return row

    def _group(self, taken: int) -> tuple[list[PackedRow], np.ndarray]:
        """The rows of the group at the cursor's place, and the state after it. `taken`: the offset, as which it is left."""
        cursor, state = self._cursor, self._cursor.state
        state[OFFSET] = 0
        cursor.tokens()  # goes to the first document that can be read, perhaps of the next chunk
        before = state.copy()
        pieces: list[np.ndarray] = []
        total = 0
        while total < _GROUP_ROWS * self._length:
            tokens = cursor.tokens()
            if state[CHUNK] != before[CHUNK]:  # the last documents of the chunk are damaged
                break
            pieces += self._pieces(tokens)
            total += len(tokens)
            cursor.next_document()
            if cursor.chunk_ends():
                break
        after = state.copy()
        rows = [self._row(row) for row in best_fit(pieces, self._length)]
        order = permute(np.arange(len(rows)), len(rows), keys_of(self._seed, "rows", *before[: DOCUMENT + 1].tolist()))
        before[OFFSET] = taken
        cursor.go_to(before)
        return [rows[index] for index in order.tolist()], after

    def _pieces(self, tokens: np.ndarray) -> list[np.ndarray]:
        """A document in pieces that fit. Each but the first begins with the last target of the one before."""
        step = self._length - 1
        return [tokens[at : at + self._length] for at in range(0, max(len(tokens) - 1, 1), step)]

    def _row(self, pieces: list[np.ndarray]) -> PackedRow:
        tokens = np.zeros(self._length, np.int32)
        segments = np.full(self._length, -1, np.int32)
        at = 0
        for segment, piece in enumerate(pieces):
            tokens[at : at + len(piece)] = piece
            segments[at : at + len(piece)] = segment
            at += len(piece)
        return PackedRow(tokens, segments)


def _nowhere(state: np.ndarray) -> ValueError:
    """The error for a place behind the end of a document or group, which no run saves."""
    return ValueError(
        f"data: the checkpoint's place in the documents is none: number {state[OFFSET]} of document {state[DOCUMENT]} of chunk "
        f"{state[CHUNK]}; were the shards replaced by others of the same size? Start another run with --run"
    )


def best_fit(pieces: list[np.ndarray], capacity: int) -> list[list[np.ndarray]]:
    """Pack pieces into rows of a capacity, the longest first, each into the row that has the least room for it."""
    rows: list[list[np.ndarray]] = []
    rooms: list[tuple[int, int]] = []  # room and number of each row, sorted
    for piece in sorted(pieces, key=len, reverse=True):  # pieces of one length stay in order
        at = bisect_left(rooms, (len(piece), -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
            rows[number].append(piece)
        else:
            room, number = capacity, len(rows)
            rows.append([piece])
        left = (room - len(piece), number)
        rooms.insert(bisect_left(rooms, left), left)
    return rows
