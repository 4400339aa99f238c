"""The comparison of what several ranks hold alike: their numbers, and the bits of the rows that they have copies of.

A check sends one small object per rank: a digest for each set of ranks that hold copies together. Only if digests differ do the ranks
exchange the checksums of single tensors, and the words of the first block that differs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from collectives import Communicator
from mpitrain.job.health.checksums import BLOCK, WORD_BYTES, Checksum, block_sums, checksums
from mpitrain.job.health.holdings import Holding
from mpitrain.job.health.pieces import RowCopies, TensorRows, common_rows, index_in_whole
from mpitrain.job.health.verdict import Verdict, judge, together

Numbers = Mapping[str, str]
"""What all ranks must have alike, as text: settings, the step, the algorithm table."""


class Difference(NamedTuple):
    """Copies that are not alike."""

    verdict: Verdict
    names: list[str]
    """The tensors, or the numbers, that differ."""
    first: str
    """The first difference, in words."""


class Replicas:
    """The copies on the ranks of `comm`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._described = b""  # a digest of this rank's holdings at the time of the plan
        self._plan: list[RowCopies] = []
        self._mine: list[
            tuple[int, int]
        ] = []  # for each entry of the plan that this rank holds: its number, the holding's number

    def compare(
        self, holdings: Sequence[Holding], known: Mapping[TensorRows, Checksum], numbers: Numbers, news: Any = None
    ) -> tuple[Difference | None, list[Any]]:
        """The first difference between copies, the same on all ranks, and the `news` of all ranks. Collective.

        `known`: checksums of whole holdings that need not be computed again. `news`: something that each rank tells the others.
        """
        rows = [holding.rows for holding in holdings]
        described = hashlib.blake2b(repr(rows).encode(), digest_size=16).digest()
        fits = described == self._described
        message = (fits, _digest(sorted(numbers.items())), self._digests(holdings, known) if fits else {}, news)
        answers = self._comm.all_gather_object(message)
        if not all(fits for fits, *_ in answers):
            self._make_plan(rows, described)
            digests = self._comm.all_gather_object(self._digests(holdings, known))
            answers = [(True, number, its, new) for (_, number, _, new), its in zip(answers, digests, strict=True)]
        all_news = [new for *_, new in answers]
        if len({number for _, number, *_ in answers}) > 1:
            return self._number(numbers), all_news
        differing = {
            ranks
            for _, _, its, _ in answers
            for ranks, digest in its.items()
            if any(answers[rank][2].get(ranks) != digest for rank in ranks)
        }
        return (self._tensor(holdings, known, differing) if differing else None), all_news

    def _make_plan(self, rows: Sequence[TensorRows], described: bytes) -> None:
        """Find the rows that several ranks hold. Collective."""
        self._plan = common_rows(self._comm.all_gather_object(rows))
        places: dict[tuple[str, Any], list[int]] = {}
        for number, its in enumerate(rows):
            places.setdefault((its.name, its.of), []).append(number)
        self._mine = [
            (entry, number)
            for entry, (piece, ranks) in enumerate(self._plan)
            if self._comm.rank in ranks
            for number in places[piece.name, piece.of]
            if rows[number].begin <= piece.begin and piece.end <= rows[number].end
        ]
        self._described = described

    def _checksums(self, holdings: Sequence[Holding], known: Mapping[TensorRows, Checksum]) -> dict[int, Checksum]:
        """The checksum of each entry of the plan that this rank holds."""
        found: dict[int, Checksum] = {}
        missing: dict[int, torch.Tensor] = {}
        for entry, number in self._mine:
            piece, holding = self._plan[entry].rows, holdings[number]
            if piece == holding.rows and piece in known:
                found[entry] = known[piece]
            else:
                missing[entry] = holding.values(piece.begin, piece.end)
        found.update(zip(missing, checksums(list(missing.values())), strict=True))
        return {entry: found[entry] for entry, _ in self._mine}

    def _digests(
        self, holdings: Sequence[Holding], known: Mapping[TensorRows, Checksum]
    ) -> dict[tuple[int, ...], bytes]:
        """For each set of ranks to which this rank belongs a digest of what they hold."""
        sums: dict[tuple[int, ...], list[Checksum]] = {}
        for entry, checksum in self._checksums(holdings, known).items():
            sums.setdefault(self._plan[entry].ranks, []).append(checksum)
        return {ranks: _digest(its) for ranks, its in sums.items()}

    def _number(self, numbers: Numbers) -> Difference:
        everyones: list[Numbers] = self._comm.all_gather_object(dict(numbers))
        verdicts, names, first = [], [], ""
        for name in dict.fromkeys(name for theirs in everyones for name in theirs):
            values = {rank: theirs.get(name, "nothing") for rank, theirs in enumerate(everyones)}
            verdict = judge(values)
            if verdict is None:
                continue
            verdicts.append(verdict)
            names.append(name)
            first = first or f"{name}: {_line_that_differs(values, verdict)}"
        return Difference(together(verdicts), names, first)

    def _tensor(
        self, holdings: Sequence[Holding], known: Mapping[TensorRows, Checksum], differing: set[tuple[int, ...]]
    ) -> Difference:
        own = {e: c for e, c in self._checksums(holdings, known).items() if self._plan[e].ranks in differing}
        everyones: list[dict[int, Checksum]] = self._comm.all_gather_object(own)
        wrong: dict[int, Verdict] = {}
        for entry, (_, ranks) in enumerate(self._plan):
            if ranks in differing and (verdict := judge({rank: everyones[rank][entry] for rank in ranks})):
                wrong[entry] = verdict
        names = list(dict.fromkeys(self._plan[entry].rows.name for entry in wrong))
        first = next(iter(wrong))
        return Difference(together(wrong.values()), names, self._first(holdings, first, wrong[first], everyones))

    def _first(
        self, holdings: Sequence[Holding], entry: int, verdict: Verdict, sums: Sequence[Mapping[int, Checksum]]
    ) -> str:
        """The first element that differs, in words. Collective."""
        rows, ranks = self._plan[entry]
        wrong = verdict.suspects[0]
        right = next(rank for rank in ranks if sums[rank][entry] != sums[wrong][entry])
        number = next((number for mine, number in self._mine if mine == entry), None)
        values = None
        if number is not None and self._comm.rank in (wrong, right):
            values = holdings[number].values(rows.begin, rows.end)
        blocks = self._comm.all_gather_object(None if values is None else block_sums(values))
        at = next((i for i, (a, b) in enumerate(zip(blocks[wrong], blocks[right], strict=True)) if a != b), 0)
        mine = None
        if values is not None:
            count = BLOCK * WORD_BYTES // values.itemsize
            flat = values.contiguous().view(-1)[at * count : (at + 1) * count].cpu()
            mine = flat, at * count, tuple(values.shape), holdings[number].dim  # type: ignore[index]
        answers = self._comm.all_gather_object(mine)
        (there, start, shape, dim), (here, *_) = answers[wrong], answers[right]
        different = (there.view(torch.uint8) != here.view(torch.uint8)).nonzero()
        if not len(different):
            return rows.name  # the bits changed between two looks at them
        element = int(different[0]) // there.itemsize
        place = _unraveled(start + element, shape)
        if place and rows.of and len(rows.of[0][0]) == len(rows.of[0][1]) == len(place):
            index = tuple(i + rows.begin * (d == dim) for d, i in enumerate(place))
            place = index_in_whole(rows.of, index)
        values_said = " and ".join(
            f"{its[element].item():.9g} on rank {rank}" for rank, its in ((wrong, there), (right, here))
        )
        return f"{rows.name}{list(place) if place else ''} is {values_said}"


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _line_that_differs(values: Mapping[int, str], verdict: Verdict) -> str:
    """The first line that differs between a suspect and a rank with another text."""
    wrong = verdict.suspects[0]
    right = next(rank for rank, value in values.items() if value != values[wrong])
    mine, theirs = (values[rank].splitlines() or [""] for rank in (wrong, right))
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    said = [f"{(lines[at] if at < len(lines) else 'nothing more')[:120]!r}" for lines in (mine, theirs)]
    return f"{said[0]} on rank {wrong}, {said[1]} on rank {right}"


def _unraveled(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for length in reversed(shape):
        element, at = divmod(element, max(length, 1))
        place.append(at)
    return tuple(reversed(place))
