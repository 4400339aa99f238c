"""All settings with their types and ranges: frozen dataclasses that check their values. This module reads and writes no text.

The larger sections have files of their own: data.py, parallel.py, optim.py. What depends on the number of ranks is in ranks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_type_hints

from mpitrain.job.config.data import DataConfig
from mpitrain.job.config.errors import ConfigError, expect
from mpitrain.job.config.optim import OptimConfig
from mpitrain.job.config.parallel import ParallelConfig
from mpitrain.models.sizes import TransformerConfig, resolve

MOST_TRACED = 200
"""Steps of a trace. It grows by some MB of memory a step."""


@dataclass(frozen=True)
class ModelConfig:
    """The model: a named size of a family. Each of its numbers can be replaced."""

    family: Literal["gpt", "llama"] = "gpt"
    """gpt: like GPT-2. llama: like Llama 2 and 3, with RMS norms, rotary positions, SwiGLU and grouped queries."""
    size: str = "tiny"
    """A named size. gpt: tiny, small (GPT-2's 124 M), medium, large, xl. llama: tiny, 1b (Llama 3.2's), 7b (Llama 2's), 8b and 70b
    (Llama 3.1's)."""
    width: int | None = None
    """Length of a token's vector, instead of the named size's."""
    layers: int | None = None
    """Number of blocks, instead of the named size's."""
    heads: int | None = None
    """Attention heads per block, instead of the named size's."""
    kv_heads: int | None = None
    """Heads of keys and values, instead of the named size's; a divisor of the heads. Of llama alone: a gpt has as many as heads."""
    context: int | None = None
    """Tokens in a sequence, instead of the named size's."""
    vocab: int | None = None
    """Number of different tokens, instead of the named size's. Where tokens are bytes, 256 is enough."""
    tied: bool | None = None
    """The head shares the embedding's weight, instead of the named size's choice: all of gpt are tied, and 1b of llama."""

    def __post_init__(self) -> None:
        expect("model.kv_heads", self.kv_heads, 1)
        expect("model.vocab", self.vocab, 1)
        self.resolve()

    def resolve(self) -> TransformerConfig:
        """The model's numbers.

        Raises:
            ConfigError: an unknown size, or numbers that do not fit together.
        """
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("family", "size")}
        try:
            return resolve(self.size, self.family, **numbers)
        except ValueError as error:
            raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class TrainConfig:
    """The length of the training, the batch, evaluations and the sample."""

    steps: int = 1000
    """Steps of the optimizer, skipped steps included."""
    batch: int = 12
    """Sequences in a global batch: the sum over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches per step."""
    slices: int = 0
    """A power of two: divide each global batch into so many equal slices, the micro-batches of the ranks, and add up all that is summed
    over them in one order. Then training is deterministic and bitwise reproducible: losses and parameters have the same bits at any
    number of ranks up to this one; 0: off."""
    elastic: bool = False
    """After a loss of ranks the others go on in place. Needs Open MPI's `mpirun --with-ft ulfm`. Ranks may have different numbers of
    sequences."""
    min_ranks: int = 1
    """With `elastic`: the smallest number of ranks, of those that have a place in the layout, that goes on."""
    copy_every: int = 10
    """With `elastic`: steps between copies of the state in node memory, from which a run goes on after a loss; 0: no copies."""
    max_skipped_steps: int = 0
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more is an error."""
    max_rewinds: int = 0
    """Times that a run goes back to its last good state, and leaves out the data of the bad steps, before such an error ends it."""
    spike_threshold: float = 20.0
    """A loss or gradient norm that is so many robust standard deviations above the median of the last steps is a spike; 0: none is."""
    skip_spikes: bool = False
    """Leave out a step with a spike, and its data."""
    check_every: int = 50
    """Steps between two checks: do copies on different ranks agree, and have the ranks' shards kept their bits; 0: no checks. A step
    before a checkpoint is checked, too."""
    seed: int = 0
    """Seed of the initial values, of the order of the data, and of the sample."""
    eval_every: int = 250
    """Steps between evaluations; 0: only at the end."""
    eval_batches: int = 20
    """Held-out batches per evaluation; 0: no evaluations."""
    eval_only: bool = False
    """Evaluate the checkpoint, and do not train."""
    sample_bytes: int | None = None
    """Length of the sample, a text that the model generates at the end of the run; 0: no sample; None: 400 or what 30 s give, in a
    batch job (of Slurm or PBS) 0."""
    sample_prompt: str = "def "
    """The beginning of the sample."""
    sample_temperature: float = 0.8
    """A higher value makes the sample more random; 0 always takes the most probable byte."""

    def micro_batches(self, num_data: int) -> int:
        """The micro-batches of each rank in a step, if so many ranks have different data."""
        return -(-self.slices // num_data) if self.slices else self.accumulate

    def rows(self, num_data: int) -> int:
        """The sequences of a micro-batch, if so many ranks have different data; the fewest if they have different numbers."""
        return self.batch // (self.slices or num_data * self.accumulate)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "min_ranks"):
            expect(f"train.{name}", getattr(self, name), 1)
        for name in (
            "copy_every",
            "max_skipped_steps",
            "max_rewinds",
            "spike_threshold",
            "check_every",
            "seed",
            "eval_every",
            "eval_batches",
            "sample_temperature",
        ):
            expect(f"train.{name}", getattr(self, name), 0)
        if self.sample_bytes is not None:
            expect("train.sample_bytes", self.sample_bytes, 0)
        if self.slices < 0 or self.slices.bit_count() > 1:
            raise ConfigError(f"train.slices: expected a power of two, or 0, got {self.slices}")
        if self.slices and self.batch % self.slices:
            raise ConfigError(
                f"train.batch: {self.batch} sequences do not make {self.slices} equal slices (train.slices); expected a multiple, such "
                f"as {-(-self.batch // self.slices) * self.slices}"
            )
        if self.slices and self.accumulate > 1:
            raise ConfigError(
                "train.accumulate: with train.slices the slices are the micro-batches; expected only one of the two"
            )
        if self.sample_bytes != 0 and not self.sample_prompt:
            raise ConfigError("train.sample_prompt: expected at least one character, got none")


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints of the run. A run always saves one at its end, and when it is asked to stop."""

    every: int = 500
    """Steps between checkpoints; 0: only one, at the end or at a stop."""
    keep: int = 3
    """Number of newest checkpoints that are kept; older ones are deleted."""
    keep_every: int = 0
    """Checkpoints at multiples of this number of steps are never deleted; 0: every old checkpoint is deleted."""
    files: str = "rank"
    """Data files of a checkpoint: rank (one per rank), node (one per node), one, or a number: the largest number of files."""
    driver: Literal["posix", "mpio", "mpio-collective"] = "posix"
    """posix: each rank writes by itself; mpio, mpio-collective: with parallel HDF5, for file systems that need MPI-IO."""
    background: bool = False
    """Write checkpoints from a copy in host memory while the training continues."""
    copies: tuple[str, ...] = ()
    """Folders or URLs (s3://bucket/run) for copies of each checkpoint of this run only; read if a checkpoint is lost or damaged."""
    private: bool = False
    """The folders of checkpoints, and of copies in local folders, have mode 0700: for this user alone. Else the umask decides."""

    def __post_init__(self) -> None:
        expect("checkpoint.every", self.every, 0)
        expect("checkpoint.keep", self.keep, 1)
        expect("checkpoint.keep_every", self.keep_every, 0)
        if not all(self.copies):
            raise ConfigError(f"checkpoint.copies: expected folders or URLs, got {self.copies!r}")
        if self.background and self.driver != "posix":
            raise ConfigError(
                f"checkpoint.driver: {self.driver} cannot write in the background; choose posix, or no background"
            )
        if self.files not in ("rank", "node", "one") and not (self.files.isdecimal() and int(self.files) > 0):
            raise ConfigError(f"checkpoint.files: expected rank, node, one or a number from 1, got {self.files!r}")

    @property
    def num_files(self) -> str | int:
        """The argument `files` of `ckpt.save`."""
        return int(self.files) if self.files.isdecimal() else self.files


@dataclass(frozen=True)
class LogConfig:
    """What a run prints and records: see docs/monitoring.md."""

    every: int = 10
    """Steps between progress lines."""
    sinks: tuple[Literal["csv", "tensorboard", "wandb", "trackio"], ...] = ()
    """Where figures go beside the record of the run (metrics.jsonl, ranks.jsonl, events.jsonl), which is always written."""
    project: str = "mpitrain"
    """The project of the run in wandb and trackio."""
    on_event: str | None = None
    """A shell command that is run for each event, such as a spike or a failure, with the event as JSON on its standard input."""
    layers_every: int = 0
    """Steps between figures of each layer: norms of gradients and parameters, update ratios, shares of zeros, and the entropy of the
    logits; 0: none."""
    trace_steps: str | None = None
    """The first and the last step of a trace, FIRST:LAST, such as 100:103."""
    modules: tuple[str, ...] = ()
    """Python modules or files that are imported at the start. They add metrics, sinks and callbacks by `mpitrain.log`."""

    def __post_init__(self) -> None:
        expect("log.every", self.every, 1)
        expect("log.layers_every", self.layers_every, 0)
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"log.sinks: expected different sinks, got {' '.join(self.sinks)}")
        if self.on_event is not None and not self.on_event.strip():
            raise ConfigError("log.on_event: expected a shell command, got none")
        if self.trace_steps is not None and self.traced is None:
            raise ConfigError(
                f"log.trace_steps: expected FIRST:LAST with 1 <= FIRST <= LAST, such as 100:103, got {self.trace_steps}"
            )
        if self.traced is not None and self.traced[1] - self.traced[0] >= MOST_TRACED:
            raise ConfigError(f"log.trace_steps: expected at most {MOST_TRACED} steps, got {self.trace_steps}")

    @property
    def traced(self) -> tuple[int, int] | None:
        """The first and the last step of `trace_steps`, from 1."""
        first, _, last = (self.trace_steps or "").partition(":")
        if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
            return int(first), int(last)
        return None


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    run: str = "runs/default"
    """The run's folder: settings, metrics and checkpoints."""
    resume: str = "auto"
    """auto: continue from the run's last checkpoint if there is one; never: start at step 0; or the path of a checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("run", "resume"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: expected a text that is not empty")
        parallel = self.parallel
        if self.train.slices:
            for name, off in (("compress", "none"), ("local_steps", 0), ("wire", "fp32"), ("wire_weights", "fp32")):
                if getattr(parallel, name) != off:
                    raise ConfigError(
                        f"train.slices: with parallel.{name} {getattr(parallel, name)} bits depend on the number of ranks; expected "
                        f"{off}, or train.slices 0"
                    )
        if self.model.resolve().vocab < 256 and self.data.tokenizer == "bytes" and not self.data.has_tokens:
            raise ConfigError(f"model.vocab: expected at least 256, because tokens are bytes, got {self.model.vocab}")


def kinds() -> dict[str, Any]:
    """The type of every setting by its full name. Settings without a section come first."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(Config).items():
        types |= {f"{name}.{k}": t for k, t in get_type_hints(kind).items()} if is_dataclass(kind) else {name: kind}
    return types


def flat(config: Config) -> dict[str, Any]:
    """The value of every setting by its full name, with the numbers of `OptimConfig.resolve`. Settings without a section come first."""
    resolved = replace(config, optim=replace(config.optim, **config.optim.resolve()._asdict()))
    return {name: attrgetter(name)(resolved) for name in kinds()}
