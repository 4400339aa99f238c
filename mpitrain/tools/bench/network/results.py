"""The figures of `bench wire` and `bench losses`, and their tables. The module imports neither torch nor MPI."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from collectives.bench.kit.launches import Launch
from collectives.shared.tables import new_table
from mpitrain.tools.bench.results import BenchCase

EXACT = "fp32"


@dataclass(frozen=True)
class WireRow:
    """The steps of a model with one stage of ZeRO and one format."""

    stage: int
    wire: str
    """The format of gradients, in stage 3 also of weights."""
    step_s: float
    """Median over the steps of the slowest rank's time."""
    fastest_s: float
    slowest_s: float
    sent_bytes: int
    """Bytes that a node's network devices send in a step, with headers and acknowledgements: mean of the nodes."""
    counted_bytes: int
    """`collectives.network_bytes` of a node's ranks in a step: contents of messages, but not those of algorithm "mpi"."""
    loss: float
    """The loss of the last step, mean over the ranks."""


@dataclass(frozen=True)
class WireLaunch(Launch):
    """The figures of one job of `bench wire`."""

    FORMAT = 1
    COMMAND = "python -m mpitrain bench wire --json"
    ALIKE = ("machine", "ranks", "nodes", "threads", "case", "codec")

    threads: int
    case: BenchCase
    codec: str
    """The implementation of the codec."""
    steps: int
    rows: Sequence[WireRow] = ()

    def step_s(self, stage: int) -> float | None:
        """The step's time in this stage: the median over the formats, which differ only between nodes. None if it was not measured."""
        found = [row.step_s for row in self.rows if row.stage == stage]
        return median(found) if found else None


def wire_tables(launch: WireLaunch, beside: WireLaunch | None) -> Iterator[RenderableType]:
    """The output of `bench wire`. `beside`: the same ranks on one node."""
    headings = ["stage", "format", "step ms", "fastest .. slowest", "MB sent a node", "ratio", "counted"]
    if beside is not None:
        headings += ["one node ms", "more ms", "ratio"]
    table = new_table(headings, title=f"{launch.case}; {launch.ranks_on_nodes}, {launch.steps} steps", left=2)
    for row in launch.rows:
        exact = next((other for other in launch.rows if (other.stage, other.wire) == (row.stage, EXACT)), None)
        cells = [
            str(row.stage),
            row.wire,
            f"{row.step_s * 1e3:,.1f}",
            f"{row.fastest_s * 1e3:,.1f} .. {row.slowest_s * 1e3:,.1f}",
            f"{row.sent_bytes / 1e6:,.2f}",
            _ratio(row.sent_bytes, None if exact is None else exact.sent_bytes),
            f"{row.counted_bytes / 1e6:,.2f}",
        ]
        if beside is not None:
            alone_s = beside.step_s(row.stage)
            cells += ["", "", ""] if alone_s is None else [
                f"{alone_s * 1e3:,.1f}",
                f"{(row.step_s - alone_s) * 1e3:,.1f}",
                _ratio(row.step_s - alone_s, None if exact is None else exact.step_s - alone_s),
            ]  # fmt: skip
        table.add_row(*cells)
    yield table
    yield Text(
        "ratio: to fp32 of the stage. MB sent: by the network devices, with headers. counted: by our collectives, without MPI's own.\n"
        f"more: the time of the step beyond that of the same ranks on one node. Codec: {launch.codec}.",
        style="dim",
    )


def _ratio(value: float, to: float | None) -> str:
    return "" if not to or to < 0 else f"{value / to:.3f}"


@dataclass(frozen=True)
class LossRun:
    """One training run of `bench losses`."""

    case: str
    seed: int
    loss: float
    """Nats per token of the held-out data after the last step."""
    sent_bytes: int
    """Bytes that the network devices of all nodes have sent in the run."""
    seconds: float


@dataclass(frozen=True)
class LossesLaunch(Launch):
    """The runs of one or several jobs of `bench losses` on the same numbers of ranks and nodes."""

    FORMAT = 1
    COMMAND = "python -m mpitrain bench losses --json"
    ALIKE = ("ranks", "nodes", "settings")

    settings: Sequence[str]
    """Those of all runs, as flags."""
    cases: Mapping[str, Sequence[str]]
    """The settings of each case, as flags."""
    runs: Sequence[LossRun] = ()

    def runs_of(self, case: str) -> dict[int, LossRun]:
        """The runs of a case by their seeds."""
        return {run.seed: run for run in self.runs if run.case == case}


def loss_tables(launch: LossesLaunch, *, reference: str) -> Iterator[RenderableType]:
    """The output of `bench losses`: the differences to the run of `reference` with the same seed."""
    table = new_table(
        ["case", "seeds", "held-out", "difference", "+-", "of each seed", "MB sent", "ratio"],
        title=f"held-out loss in nats, {launch.ranks_on_nodes}: {' '.join(launch.settings)}",
    )
    exact = launch.runs_of(reference)
    for case in launch.cases:
        runs = launch.runs_of(case)
        if not runs:
            continue
        found = [run.loss - exact[seed].loss for seed, run in runs.items() if seed in exact]
        # Half the width of a 68 % interval of the mean, for a normal distribution.
        error = f"{stdev(found) / len(found) ** 0.5:.4f}" if len(found) > 1 and case != reference else ""
        sent = mean(run.sent_bytes for run in runs.values())
        of_exact = mean(run.sent_bytes for run in exact.values()) if exact else None
        table.add_row(
            case,
            str(len(runs)),
            f"{mean(run.loss for run in runs.values()):.4f}",
            f"{mean(found):+.4f}" if found else "",
            error,
            " ".join(f"{each:+.4f}" for each in found),
            f"{sent / 1e6:,.1f}",
            _ratio(sent, of_exact),
        )
    yield table
    yield Text(
        f"difference: mean of the differences to {reference} with the same seed; +-: its standard error.", style="dim"
    )


def settings_of(launch: LossesLaunch) -> tuple[Any, ...]:
    """What must be the same in two jobs whose runs are compared."""
    return launch.ranks, launch.nodes, list(launch.settings)
