"""The table from which "auto" chooses: thresholds in bytes, measured by `python -m collectives tune` or built in. It is only data.

An entry is valid for an operation, a kind of dtype and of memory, and the numbers of ranks and nodes of its measurement. A communicator
uses the nearest entry, extrapolated to its own number of ranks.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from collectives.schedules import BUILDERS, PIPELINED, TWO_LEVEL, build
from collectives.selection.selector import ALGORITHMS, MEMORIES, Placement

VERSION = 2  # of the format below and the meaning of the algorithms' names; tables of other versions are not used
KINDS = ("native", "half")  # dtypes that MPI can reduce, and dtypes that it cannot (see selector.kind_of)

_LATENCY_BYTES = 8 << 10  # the bytes that a link carries in the latency of a message: 2 us at 4 GB/s
# Measured by `tune --output` on 2 ranks of one machine. The entries for fp16 and bf16 on 16 ranks and more are computed by
# schedules/cost.py (1 us and 5 GB/s within a node, 2 us and one link of 12 GB/s between nodes).
_BUILT_IN = Path(__file__).with_name("builtin_table.json")


class TableEntry(NamedTuple):
    """`choices`: (largest size of the whole array in bytes, algorithm), sorted; the last one is (None, algorithm), for larger sizes."""

    operation: str
    kind: str  # one of KINDS
    memory: str  # one of selector.MEMORIES
    ranks: int
    nodes: int
    choices: tuple[tuple[int | None, str], ...]

    def distance(self, placement: Placement) -> float:
        """The distance of `placement` from that of the measurement, in doublings of the ranks on a node and of the nodes."""
        a_node = abs(log2(self.ranks / self.nodes) - log2(placement.size / placement.num_nodes))
        return a_node + abs(log2(self.nodes) - log2(placement.num_nodes))


@dataclass(frozen=True)
class Table:
    """Entries, and the `machine` of their measurement (see table_cache.py); None for built-in entries and those of a program."""

    entries: tuple[TableEntry, ...]
    machine: Mapping[str, Any] | None = None

    def choices(
        self, operation: str, kind: str, memory: str, placement: Placement
    ) -> tuple[tuple[int | None, str], ...]:
        """The thresholds of the nearest entry for `placement`: only of entries of one node if it has one node, else only of the others.

        Without an entry for `memory` an entry for private memory is used; without one for `kind` "half", one for "native"; else "mpi".
        """
        for this_kind in dict.fromkeys((kind, "native")):
            for this_memory in dict.fromkeys((memory, "private")):
                entries = [
                    entry
                    for entry in self.entries
                    if entry[:3] == (operation, this_kind, this_memory)
                    and (entry.nodes > 1) == (placement.num_nodes > 1)
                ]
                if entries:
                    nearest = min(entries, key=lambda entry: (entry.distance(placement), entry))
                    return _scaled(nearest, placement.size)
        return ((None, "mpi"),)

    def over(self, other: "Table") -> "Table":
        """This table plus the entries of `other` for cases that this table does not have for any number of ranks."""

        def case(entry: TableEntry) -> tuple[str, str, str, bool]:
            return entry.operation, entry.kind, entry.memory, entry.nodes > 1

        measured = {case(entry) for entry in self.entries}
        return Table((*self.entries, *(entry for entry in other.entries if case(entry) not in measured)), self.machine)

    def with_entries(self, entries: Iterable[TableEntry]) -> "Table":
        """This table without a machine, sorted, in which `entries` replace those of the same case, ranks and nodes."""
        merged = {entry[:5]: entry for entry in (*self.entries, *entries)}
        return Table(tuple(sorted(merged.values(), key=lambda entry: entry[:5])))

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values, from which `from_dict` makes an equal table."""
        entries = [{**entry._asdict(), "choices": [list(choice) for choice in entry.choices]} for entry in self.entries]
        return {"version": VERSION, "machine": None if self.machine is None else dict(self.machine), "entries": entries}

    def to_json(self) -> str:
        """The text of `to_dict`, with a line for each entry."""
        parts = self.to_dict()
        entries = ",\n".join(f"  {json.dumps(entry)}" for entry in parts["entries"])
        return f'{{\n "version": {VERSION},\n "machine": {json.dumps(parts["machine"])},\n "entries": [\n{entries}\n ]\n}}\n'

    @classmethod
    def from_dict(cls, data: object) -> "Table":
        """The table of a result of `to_dict`. ValueError, which names the wrong place, for other data."""
        if not isinstance(data, Mapping):
            raise ValueError(f"table: {_shown(data)}; expected an object with version and entries")
        if data.get("version") != VERSION:
            raise ValueError(f"table: version {_shown(data.get('version'))}; expected {VERSION}")
        machine, rows = data.get("machine"), data.get("entries")
        if machine is not None and not isinstance(machine, Mapping):
            raise ValueError(f"table: machine {_shown(machine)}; expected an object or null")
        if not isinstance(rows, list | tuple):
            raise ValueError(f"table: entries {_shown(rows)}; expected a list")
        entries = tuple(_entry(f"table: entries[{i}]", row) for i, row in enumerate(rows))
        if len({entry[:5] for entry in entries}) != len(entries):
            raise ValueError("table: two entries for the same operation, kind, memory, ranks and nodes")
        return cls(entries, machine)


@functools.cache
def built_in() -> Table:
    """The table of this package, for machines without a measured table."""
    return Table.from_dict(json.loads(_BUILT_IN.read_text()))


def _entry(where: str, row: object) -> TableEntry:
    """The entry of a table in `row`. ValueError if a value is wrong."""
    if not isinstance(row, Mapping) or set(row) != set(TableEntry._fields):
        raise ValueError(f"{where}: {_shown(row)}; expected an object with {', '.join(TableEntry._fields)}")
    for name, known in (("operation", ALGORITHMS), ("kind", KINDS), ("memory", MEMORIES)):
        if row[name] not in tuple(known):
            raise ValueError(f"{where}: {name} {_shown(row[name])}; expected one of {', '.join(known)}")
    for name in ("ranks", "nodes"):
        if type(row[name]) is not int or row[name] < 1:
            raise ValueError(f"{where}: {name} {_shown(row[name])}; expected a whole number from 1")
    if row["ranks"] < row["nodes"]:
        raise ValueError(f"{where}: {row['ranks']} ranks on {row['nodes']} nodes; expected at least one rank a node")
    choices = row["choices"]
    if (
        not isinstance(choices, list | tuple)
        or not choices
        or not all(isinstance(choice, list | tuple) and len(choice) == 2 for choice in choices)
    ):
        raise ValueError(f"{where}: choices {_shown(choices)}; expected a list of [up to bytes, algorithm]")
    below = 0
    for i, (up_to, algorithm) in enumerate(choices):
        if algorithm not in ALGORITHMS[row["operation"]]:
            raise ValueError(
                f"{where}: algorithm {_shown(algorithm)}; expected one of {', '.join(ALGORITHMS[row['operation']])}"
            )
        if i == len(choices) - 1:
            if up_to is not None:
                raise ValueError(f"{where}: the last choice is up to {_shown(up_to)}; expected null, for all above")
        elif type(up_to) is not int or up_to <= below:
            raise ValueError(f"{where}: a choice up to {_shown(up_to)} bytes; expected a whole number above {below}")
        else:
            below = up_to
    return TableEntry(**{**row, "choices": tuple((up_to, algorithm) for up_to, algorithm in choices)})


def _shown(value: object) -> str:
    """A value from a file as text for an error, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _scaled(entry: TableEntry, size: int) -> tuple[tuple[int | None, str], ...]:
    """The entry's thresholds for `size` ranks: between two schedules scaled by their costs, else as measured.

    Two algorithms take the same time at (difference of rounds / difference of traffic) x latency x bandwidth. Latency and bandwidth
    belong to the machine, so a threshold scales with the quotient. If the quotient does not exist for the measured number of ranks (on
    two ranks most algorithms have the same cost), a typical product of latency and bandwidth is used.
    """
    if size == entry.ranks or size == 1:
        return entry.choices
    scaled: list[tuple[int | None, str]] = []
    below = 0
    for (up_to, name), (_, following) in zip(entry.choices, (*entry.choices[1:], (None, "")), strict=True):
        if up_to is not None:
            there, here = (_break_even(entry.operation, name, following, ranks) for ranks in (entry.ranks, size))
            if here is not None:
                up_to = max(up_to, round(here * _LATENCY_BYTES)) if there is None else round(up_to * here / there)
            if up_to <= below:
                continue  # an empty range
            below = up_to
        scaled.append((up_to, name))
    return tuple(scaled)


def _break_even(operation: str, short: str, long: str, size: int) -> Fraction | None:
    """(rounds that `short` saves) / (buffers of traffic that `long` saves). None if one saves nothing, or is not a plain schedule."""
    # The cost of pipelined and two-level schedules depends on more than the number of ranks.
    plain = set(BUILDERS.get(operation, ())) - PIPELINED - TWO_LEVEL
    if not {short, long} <= plain:
        return None
    few, many = (build(operation, name, size).cost for name in (short, long))
    rounds, traffic = many.rounds - few.rounds, few.traffic - many.traffic
    return Fraction(rounds) / traffic if rounds > 0 and traffic > 0 else None
