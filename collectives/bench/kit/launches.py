"""The figures of one job, stored as a JSON file, and medians over several launches."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from collectives.communicator.communicator import Communicator
from collectives.shared.tables import plural

K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound="Launch")


@dataclass(frozen=True)
class Launch:
    """The machine and the ranks of one job; its figures are fields of the subclasses.

    `FORMAT`: the version of the file. `COMMAND`: the command that writes the file. `ALIKE`: launches can be compared if these fields
    are equal.
    """

    FORMAT: ClassVar[int]
    COMMAND: ClassVar[str]
    ALIKE: ClassVar[tuple[str, ...]]

    machine: dict[str, Any]  # see Communicator.machine
    ranks: int
    nodes: int

    @classmethod
    def of(cls, comm: Communicator, **figures: Any) -> Self:
        """A Launch with these figures, on the ranks of `comm`."""
        return cls(machine=comm.machine(), ranks=comm.size, nodes=comm.num_nodes, **figures)

    @property
    def ranks_on_nodes(self) -> str:
        """The ranks and nodes as text, such as '2 ranks on 1 node'."""
        return f"{plural(self.ranks, 'rank')} on {plural(self.nodes, 'node')}"

    def write(self, path: str) -> None:
        """Write the launch to a file as a JSON object. OSError."""
        Path(path).write_text(json.dumps({"format": self.FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str) -> Self:
        """The launch in a file of `write`. OSError; ValueError, which names the file and the command, for other files."""
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data, dict) or data.get("format") != cls.FORMAT:
                raise ValueError(f"expected format {cls.FORMAT}")
            return msgspec.convert(data, cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is no file of `{cls.COMMAND}`: {error}") from None


def alike(launches: Sequence[L]) -> list[list[L]]:
    """The launches in groups that can be compared, in their original order."""
    found: dict[str, list[L]] = {}
    for launch in launches:
        kind = json.dumps([getattr(launch, name) for name in launch.ALIKE], sort_keys=True)
        found.setdefault(kind, []).append(launch)
    return list(found.values())


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_ratio(launches: Iterable[Mapping[K, float]], one: K, other: K) -> float | None:
    """The median over the launches of the ratio of the seconds of `one` to those of `other`; None if no launch has both.

    The ratio is computed within each launch, in which both sides had the same disturbances.
    """
    return median_known(seconds[one] / seconds[other] for seconds in launches if one in seconds and other in seconds)
