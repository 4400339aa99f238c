"""What is simulated: a schedule with its times, the copies of its pipeline, and the disturbances of a run."""

from dataclasses import dataclass
from math import inf

from mpitrain.stages.schedules import Schedule, Times


@dataclass(frozen=True)
class Job:
    """A training run. All times are in seconds unless the name says hours. ValueError for values out of range.

    The ranks are `schedule.num_ranks` x `copies` x `tensor_ranks`. The ranks of a tensor group compute each action together, so each
    action takes as long as on the slowest of them. The gradients of all copies are reduced after the backwards. All ranks end a step
    together, because the norm of the gradients needs all gradients.
    """

    schedule: Schedule
    times: tuple[Times, ...]
    """Of each stage, or one for all stages: an action on one micro-batch, and the message with its result to another rank."""
    copies: int = 1
    """Of the pipeline, each with other data."""
    tensor_ranks: int = 1
    """Of a group that computes each stage together."""
    reduction_s: float = 0.0
    """What the reduction of gradients adds after the last backward. Without the part that runs during the backwards."""
    optimizer_s: float = 0.0
    jitter: float = 0.0
    """Each rank takes (1 + jitter x X) times as long for each action, and X is drawn from an exponential distribution of mean 1."""
    slow_ranks: int = 0
    """Ranks, drawn at random, that are slow throughout the run."""
    slow_factor: float = 1.2
    """How many times as long these take."""
    mtbf_hours: float = inf
    """The mean time between two failures of the job: a rank's divided by the number of ranks. Exponential distribution."""
    checkpoint_steps: int = 100
    """Steps between two checkpoints."""
    checkpoint_s: float = 0.0
    """How long a checkpoint stops the training."""
    restart_s: float = 0.0
    """From a failure until the first step: detect it, start again, load the checkpoint. A failure meanwhile starts it anew."""
    hours: float = 720.0
    """When the run ends."""
    steps: int | None = None
    """The run ends earlier if it has taken so many steps that are not lost."""
    tokens: int = 0
    """Of a step, of all ranks together."""

    def __post_init__(self) -> None:
        if len(self.times) not in (1, self.schedule.num_stages):
            raise ValueError(
                f"simulate: expected times of 1 or {self.schedule.num_stages} stages, as the schedule has; got {len(self.times)}"
            )
        for name, least in (
            ("copies", 1),
            ("tensor_ranks", 1),
            ("checkpoint_steps", 1),
            ("slow_ranks", 0),
            ("tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"simulate: {name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("reduction_s", "optimizer_s", "jitter", "checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"simulate: {name}: expected at least 0, got {getattr(self, name)}")
        if any(not 0 <= seconds < inf for times in self.times for seconds in times) or self.work_s <= 0:
            raise ValueError(f"simulate: times: expected seconds of at least 0 that are not all 0, got {self.times}")
        if not 0 < self.hours < inf or not self.mtbf_hours > 0:
            raise ValueError(f"simulate: expected hours and mtbf_hours above 0, got {self.hours} and {self.mtbf_hours}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"simulate: steps: expected at least 1, got {self.steps}")
        if self.slow_factor < 1:
            raise ValueError(f"simulate: slow_factor: expected at least 1, got {self.slow_factor}")
        if self.slow_ranks > self.num_ranks:
            raise ValueError(f"simulate: {self.slow_ranks} slow ranks of {self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks * self.copies * self.tensor_ranks

    @property
    def work_s(self) -> float:
        """A rank's computation in a step, the mean of the ranks, without jitter."""
        of_stages = sum(self.of_stage(stage).work for stage in range(self.schedule.num_stages))
        return self.schedule.num_micro * of_stages / self.schedule.num_ranks

    def of_stage(self, stage: int) -> Times:
        return self.times[stage if len(self.times) > 1 else 0]
