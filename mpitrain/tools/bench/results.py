"""The figures of a launch, and the JSON file. The module imports neither torch nor MPI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collectives.bench.kit.launches import Launch
from mpitrain.models.sizes import GPTConfig, num_parameters


@dataclass(frozen=True)
class BenchCase:
    """The model, and the batch of a rank's step: `batch` sequences of `context` tokens."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int

    def config(self) -> GPTConfig:
        """The model. ValueError for numbers that do not fit together."""
        return GPTConfig(
            vocab=256, context=self.context, width=self.width, layers=self.layers, heads=self.heads, tied=False
        )

    def __str__(self) -> str:
        size = f"{num_parameters(self.config()) / 1e6:.1f} M parameters ({self.width} x {self.layers})"
        return f"{size}, batch {self.batch} x {self.context} a rank"


@dataclass(frozen=True)
class Phases:
    """The parts of a step's time, in seconds: mean of the ranks, median over the steps."""

    forward_s: float
    backward_s: float
    comm_s: float | None
    """Communication in forward and backward, including waits for other ranks; None: unknown, and part of these two."""
    optimizer_s: float
    other_s: float
    """The rest, up to the end of the slowest rank: the gradients are dropped, and faster ranks wait."""


@dataclass(frozen=True)
class StepRow:
    """One contestant in one case."""

    name: str
    step_s: float
    """Median over the steps of the slowest rank's time."""
    fastest_s: float
    slowest_s: float
    phases: Phases
    tokens_per_s: float
    """The sum over all ranks."""
    mfu: float
    """The model's operations per second, as a share of those of a large matrix product that runs on all ranks at once."""
    loss: float
    """The loss of the last step, mean over the ranks."""
    state_bytes: int
    """Parameters, gradients and the optimizer's state between two steps, on the rank that holds most."""
    planned_s: float | None = None
    """Of a pipeline: forwards and backwards by its schedule and the median times of its actions, in the last of these steps."""
    peak_rss_bytes: int | None = None
    """Peak of the process's life, on the rank that needs most. This field and the next three need a launch with one contestant."""
    peak_pss_bytes: int | None = None
    """Peak during training. A page that N processes share counts 1/N."""
    added_pss_bytes: int | None = None
    """`peak_pss_bytes` minus the PSS of the process before the model was made."""
    peak_gpu_bytes: int | None = None
    """The peak of torch's memory on the GPU."""


@dataclass(frozen=True)
class MeasuredCase:
    """The rows of a case, ours first, and the contestants that were skipped and why."""

    case: BenchCase
    rows: Sequence[StepRow]
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HookOverhead:
    """A sharded model of many small units and the plain model, each rank alone. The median over the steps, of the slowest rank."""

    units: int
    sharded_s: float
    """Time of forward and backward."""
    plain_s: float
    sharded_step_s: float
    """Time of the whole step, with the optimizer."""
    plain_step_s: float


@dataclass(frozen=True)
class TrainingLaunch(Launch):
    """The figures of one job."""

    FORMAT = 1
    COMMAND = "python -m mpitrain bench --json"
    ALIKE = ("machine", "ranks", "nodes", "threads", "device", "dtype")

    threads: int
    device: str
    """"cpu", or the GPU's name."""
    dtype: str
    """The dtype of forward and backward."""
    steps: int
    measured: Sequence[MeasuredCase] = ()
    overhead: HookOverhead | None = None
