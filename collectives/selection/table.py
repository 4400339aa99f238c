"""The table that "auto" chooses from: thresholds in bytes, measured by `python -m collectives tune` or built in. Pure data.

An entry holds for an operation, a kind of dtype and of memory, and the numbers of ranks and nodes that it was measured on. A
communicator takes the nearest: numbers that were not measured are extrapolated to.
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

VERSION = 2  # of the form below, and of what the algorithms' names mean: another number makes measured tables void
KINDS = ("native", "half")  # what MPI can reduce, and what it cannot (see selector.kind_of)

_LATENCY_BYTES = 8 << 10  # what a link carries in the time that a message takes to set out: 2 us at 4 GB/s
# Measured by `tune --output` on 2 ranks of one machine; what it says of halves on 16 ranks and more is the price that schedules/cost.py
# gives (1 us and 5 GB/s within a node, 2 us and one link of 12 GB/s between nodes).
_BUILT_IN = Path(__file__).with_name("builtin_table.json")


class TableEntry(NamedTuple):
    """`choices`: (up to so many bytes of the whole array, algorithm), rising; the last is (None, algorithm), for all above."""

    operation: str
    kind: str  # one of KINDS
    memory: str  # one of selector.MEMORIES
    ranks: int
    nodes: int
    choices: tuple[tuple[int | None, str], ...]

    def distance(self, placement: Placement) -> float:
        """How far `placement` is from where this was measured, in doublings of the ranks a node and of the nodes."""
        a_node = abs(log2(self.ranks / self.nodes) - log2(placement.size / placement.num_nodes))
        return a_node + abs(log2(self.nodes) - log2(placement.num_nodes))


@dataclass(frozen=True)
class Table:
    """Entries, and the `machine` they were measured on (see table_cache.py); None: the built-in ones, or given by hand."""

    entries: tuple[TableEntry, ...]
    machine: Mapping[str, Any] | None = None

    def choices(
        self, operation: str, kind: str, memory: str, placement: Placement
    ) -> tuple[tuple[int | None, str], ...]:
        """The thresholds for `placement`: of the nearest entry, on as many nodes if on one, else on several.

        Where nothing was measured in that memory, that of private memory; nothing for halves, that for other dtypes. Then "mpi".
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
        """This table, and of the `other` what it says where this one says nothing, for any number of ranks: a complete one."""

        def case(entry: TableEntry) -> tuple[str, str, str, bool]:
            return entry.operation, entry.kind, entry.memory, entry.nodes > 1

        measured = {case(entry) for entry in self.entries}
        return Table((*self.entries, *(entry for entry in other.entries if case(entry) not in measured)), self.machine)

    def with_entries(self, entries: Iterable[TableEntry]) -> "Table":
        """This table with `entries` in place of those for the same case on as many ranks and nodes, sorted; of no one machine."""
        merged = {entry[:5]: entry for entry in (*self.entries, *entries)}
        return Table(tuple(sorted(merged.values(), key=lambda entry: entry[:5])))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` makes an equal table of it."""
        entries = [{**entry._asdict(), "choices": [list(choice) for choice in entry.choices]} for entry in self.entries]
        return {"version": VERSION, "machine": None if self.machine is None else dict(self.machine), "entries": entries}

    def to_json(self) -> str:
        """`to_dict` as text: a line for each entry."""
        parts = self.to_dict()
        entries = ",\n".join(f"  {json.dumps(entry)}" for entry in parts["entries"])
        return f'{{\n "version": {VERSION},\n "machine": {json.dumps(parts["machine"])},\n "entries": [\n{entries}\n ]\n}}\n'

    @classmethod
    def from_dict(cls, data: object) -> "Table":
        """The table that `to_dict` describes. ValueError, which says where, for anything else."""
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
    """The table that comes with this package, for where nothing was measured."""
    return Table.from_dict(json.loads(_BUILT_IN.read_text()))


def _entry(where: str, row: object) -> TableEntry:
    """An entry of a table, each value checked."""
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
    """A value from a file, cut to a length that leaves an error readable."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _scaled(entry: TableEntry, size: int) -> tuple[tuple[int | None, str], ...]:
    """The entry's thresholds on `size` ranks: between two schedules moved as their costs say, else as measured.

    Two algorithms take equal time where what one saves in rounds it spends on bytes: at (rounds' difference / traffic's difference) x
    latency x bandwidth. The last two are the machine's, so the threshold moves with the first. Where the measured number of ranks tells
    nothing of that product (on two, most algorithms cost the same), a typical one stands in.
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
                continue  # overtaken by the one before
            below = up_to
        scaled.append((up_to, name))
    return tuple(scaled)


def _break_even(operation: str, short: str, long: str, size: int) -> Fraction | None:
    """(rounds that `short` saves) / (buffers of traffic that `long` saves). None if not both are schedules that do so."""
    # The cost of the others depends on more than the number of ranks.
    plain = set(BUILDERS.get(operation, ())) - PIPELINED - TWO_LEVEL
    if not {short, long} <= plain:
        return None
    few, many = (build(operation, name, size).cost for name in (short, long))
    rounds, traffic = many.rounds - few.rounds, few.traffic - many.traffic
    return Fraction(rounds) / traffic if rounds > 0 and traffic > 0 else None
