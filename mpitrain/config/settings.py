"""The settings with their types and ranges: frozen dataclasses that check their values. This module reads and writes no text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_type_hints

from mpitrain.models.sizes import LlamaConfig, TransformerConfig, resolve
from mpitrain.stages.schedules import make_schedule


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range. Its message is one line for the user."""


class FolderInUseError(ConfigError):
    """Another job trains in the run's folder. The same settings may work later."""


Dtype = Literal["float32", "bfloat16", "float16"]
Wire = Literal["fp32", "bf16", "fp16", "int8", "fp8", "auto"]


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
        _expect("model.kv_heads", self.kv_heads, 1)
        _expect("model.vocab", self.vocab, 1)
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
class SourceConfig:
    """A source of documents: one table [[data.sources]] of a TOML file."""

    name: str
    """The name, which chooses the order of the documents: with the same name the order stays."""
    path: tuple[str, ...]
    """Shards: names, globs, brace ranges such as part-{000..127}.tar, or URLs."""
    weight: float = 1.0
    """The source's share of the rows, relative to the weights of the others."""
    weights: tuple[tuple[float, float], ...] = ()
    """Instead of `weight`: [step, weight] in order; between two steps the weight changes linearly."""
    field: str | None = None
    """The field of a JSON line, the column of a Parquet file, or the part of a sample in a tar file that is the text (default: text,
    or txt in a tar file)."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or not self.path or "" in self.path:
            raise ConfigError(f"data.sources: expected a name without / and paths that are not empty, got {self}")
        steps = [step for step, _ in self.weights]
        if steps != sorted(set(steps)) or not all(math.isfinite(value) for pair in self.weights for value in pair):
            raise ConfigError(f"data.sources: expected weights with growing steps, got {self.weights} for {self.name}")
        if not (math.isfinite(self.weight) and self.weight >= 0) or any(weight < 0 for _, weight in self.weights):
            raise ConfigError(f"data.sources: expected weights of at least 0, got {self}")

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The weight at some steps."""
        return self.weights or ((0, self.weight),)


_OF_TOKENS = (".bin", ".npy", ".h5", ".hdf5")


@dataclass(frozen=True)
class DataConfig:
    """The training data: text, or shards of documents."""

    path: tuple[str, ...] = ()
    """Files and folders with the training text; shards of documents (.tar, .jsonl, .parquet) as names, globs, brace ranges such as
    part-{000..127}.tar, URLs, or lists with checksums (.sha256, .md5); or files of tokens (.bin, .npy, .h5). Default: the source files
    of Python's standard library."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources of documents with weights, instead of data.path: tables [[data.sources]] of a TOML file."""
    heldout_sources: tuple[SourceConfig, ...] = ()
    """Documents for evaluation: tables [[data.heldout_sources]]. Default: a share of the documents (data.heldout)."""
    suffixes: tuple[str, ...] = ()
    """The endings of the files that are read in a folder, such as .py .md; default: every file that looks like text."""
    heldout: float = 0.05
    """Share of the data kept for evaluation. Of documents: those with keys of which a hash is below this share."""
    field: str | None = None
    """Of documents in data.path: see data.sources."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json of Hugging Face's library tokenizers, for documents and for files of tokens."""
    separator: str | None = None
    """The token of that tokenizer that follows each document (default: one of those that usually end a text, such as <|endoftext|>)."""
    lanes: int | None = None
    """Of documents: the number of parts in which they are read at the same time, a divisor of train.batch; fixed for a run (default:
    train.batch)."""
    packing: Literal["cut", "whole"] = "cut"
    """Of documents: cut fills rows with documents end to end; whole keeps documents whole that fit into a row, and pads rows."""
    mask_documents: bool = True
    """Of documents: a token attends to earlier tokens of its own document alone, and positions begin at 0 with each document. Else
    attention and positions go over the whole row."""
    processes: int = 1
    """Of documents: the processes of each rank that read and tokenize ahead of the training; 0: the rank itself, between the steps."""
    cache: str | None = None
    """Folder on a disk of each node for shards that are remote or compressed (default: a folder in $TMPDIR, else /tmp)."""
    cache_bytes: int = 64 << 30
    """The bytes that the shards in this folder may take; those that were not used for the longest time are removed."""
    max_bad_samples: int = 0
    """Of documents: how many damaged documents the run passes over, counted again in each epoch; one more ends it."""

    def __post_init__(self) -> None:
        _expect("data.heldout", self.heldout, 0, below=1)
        _expect("data.lanes", self.lanes, 1)
        _expect("data.processes", self.processes, 0)
        _expect("data.max_bad_samples", self.max_bad_samples, 0)
        _expect("data.cache_bytes", self.cache_bytes, 1)
        if "" in self.path or "" in self.suffixes:
            raise ConfigError("data.path and data.suffixes: expected values that are not empty")
        if not self.tokenizer:
            raise ConfigError("data.tokenizer: expected bytes or the path of a tokenizer.json")
        tokens = [path for path in self.path if path.endswith(_OF_TOKENS)]
        if tokens and len(tokens) < len(self.path):
            raise ConfigError(f"data.path: expected files of tokens alone, or none, got {tokens[0]} with others")
        if self.path and self.sources:
            raise ConfigError("data.path and data.sources: expected one of them, got both")
        for sources in (self.sources, self.heldout_sources):
            if len({source.name for source in sources}) < len(sources):
                raise ConfigError(f"data.sources: expected different names, got {[source.name for source in sources]}")

    @property
    def document_sources(self) -> tuple[SourceConfig, ...]:
        """The sources of documents: data.sources, or the shards of data.path as one source."""
        return self.sources or (SourceConfig("data", self.path, field=self.field),)

    @property
    def has_tokens(self) -> bool:
        """Whether data.path names files of tokens."""
        return bool(self.path) and all(path.endswith(_OF_TOKENS) for path in self.path)


@dataclass(frozen=True)
class ParallelConfig:
    """The distribution of the work over ranks, memory and cores."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: 3 shards parameters, gradients and optimizer state; 2 shards gradients and optimizer state; 1 is like 2, but
    reduces gradients at the end of the backward; 0 shards nothing."""
    copies: int = 1
    """Number of copies of the shards. One copy is spread over (ranks / copies) ranks; gradients are averaged over the copies."""
    compress: Literal["none", "top_k", "power_sgd"] = "none"
    """Compression of gradients between nodes, or between the ranks of one node: the largest elements of each matrix, or matrices of low
    rank (PowerSGD). It needs stage 0 or `copies`; with `copies` and stage 1 to 3 shards are cut only between parameters."""
    compress_rank: int = 4
    """With power_sgd: columns of the two matrices that are sent in place of a matrix."""
    compress_share: float = 0.01
    """With top_k: the share of the elements that are sent."""
    compress_feedback: bool = True
    """With `compress`: add to the next gradient what was not sent."""
    local_steps: int = 0
    """With `copies`: each copy trains alone for so many steps, then an outer step brings the copies together (DiLoCo); 0: gradients
    are averaged over the copies in each step."""
    outer: Literal["nesterov", "mean"] = "nesterov"
    """With `local_steps`: the outer optimizer. nesterov: SGD with Nesterov momentum; mean: the mean of the copies (local SGD)."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer nesterov."""
    outer_momentum: float = 0.5
    """Momentum of the outer optimizer nesterov."""
    exact_steps: int = 0
    """With `compress` or `local_steps`: in so many first steps gradients are averaged exactly over all ranks. `compress` or local steps
    begin after them."""
    tensor: int = 1
    """Ranks that hold each layer together (tensor parallelism), neighbours of one node where possible. The others share the batch."""
    sequence: bool = True
    """With `tensor`: between the matrices of a block each of these ranks has its own tokens, so activations take less memory."""
    pipeline: int = 1
    """Ranks over which the blocks are divided into stages (pipeline parallelism). The micro-batches of `train.accumulate`, or the
    slices of a rank, pass through the stages one after the other."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = "1f1b"
    """With `pipeline`: the order of the forwards and backwards; `python -m mpitrain schedules show NAME` draws it."""
    stages_per_rank: int | None = None
    """With the schedule interleaved: the number of stages of each rank, 2 to 4 (default: 2)."""
    storage: Literal["auto", "resident", "private"] = "auto"
    """Memory of full parameters. resident: one copy per node, shared by its ranks; private: each rank's (stage 3: gathered for use)."""
    param_dtype: Dtype = "float32"
    """Dtype of forward and backward; the optimizer's parameters are always float32. With float16 the loss is scaled."""
    reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are reduced over ranks. With float16 the loss is scaled."""
    wire: Wire = "fp32"
    """Format in which gradients are sent between nodes alone: no effect on one node or through NCCL. fp32: as they are; int8 and fp8
    send about 1/4 of the bytes, bf16 and fp16 half; auto measures at the start, and takes int8 or fp32. Sums are in float32."""
    wire_weights: Wire = "fp32"
    """The same for parameters, which stages 1 to 3 send. The optimizer's parameters, which checkpoints contain, keep all bits: 4 more
    bytes for each parameter of a rank's shards."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again for backward: less memory, more traffic."""
    checkpoint_activations: Literal["none", "block", "attention"] = "none"
    """Compute activations again in the backward: those of each block (less memory, about a third more time), or of each block's
    attention alone."""
    partition_activations: bool = False
    """With `checkpoint_activations` and `tensor`: if these ranks have the same input of a block or its attention, each keeps a part of
    it. With `sequence` the inputs of blocks are in parts anyway."""
    offload_activations: bool = False
    """With `checkpoint_activations`, if the ranks compute on GPUs: keep the inputs of blocks or of their attention in host memory."""
    threads: int | None = None
    """Torch's threads per rank; default: the number of the node's cores divided by the number of its ranks, or 1 with train.slices."""
    bind: bool = True
    """Bind each rank to its own cores."""
    offload: bool = False
    """If the ranks compute on GPUs: keep the shards, their gradients and the optimizer's state in host memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device on which the ranks compute; auto selects the GPUs if there are any."""

    def __post_init__(self) -> None:
        _expect("parallel.threads", self.threads, 1)
        _expect("parallel.copies", self.copies, 1)
        _expect("parallel.compress_rank", self.compress_rank, 1)
        _expect("parallel.compress_share", self.compress_share, 1e-6, below=0.5)
        if self.compress != "none" and self.local_steps:
            raise ConfigError(
                "parallel.local_steps: local steps send no gradients to compress; choose parallel.compress none"
            )
        if self.compress != "none" and self.stage > 0 and self.copies == 1:
            raise ConfigError(
                f"parallel.compress: {self.compress} needs whole matrices, and stage {self.stage} cuts them; choose "
                "--parallel.stage 0, or several --parallel.copies"
            )
        _expect("parallel.local_steps", self.local_steps, 0)
        _expect("parallel.exact_steps", self.exact_steps, 0)
        _expect("parallel.outer_momentum", self.outer_momentum, 0, below=1)
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"parallel.outer_lr: expected a number above 0, got {self.outer_lr}")
        _expect("parallel.tensor", self.tensor, 1)
        _expect("parallel.pipeline", self.pipeline, 1)
        if self.stages_per_rank is not None:
            _expect("parallel.stages_per_rank", self.stages_per_rank, 2, most=4)
            if self.schedule != "interleaved":
                raise ConfigError(
                    f"parallel.stages_per_rank: the schedule {self.schedule} has its own number of stages; only interleaved takes one"
                )
        if self.stage == 0 and self.storage == "resident":
            raise ConfigError("parallel.storage: in stage 0 each rank has its own copy; choose auto, or stage 1 to 3")
        if self.stage == 0 and self.wire_weights != "fp32":
            raise ConfigError(
                "parallel.wire_weights: in stage 0 each rank has all parameters, and sends none; choose fp32, or stage 1 to 3"
            )
        self._check_use()
        for name in ("partition_activations", "offload_activations"):
            if getattr(self, name) and self.checkpoint_activations == "none":
                raise ConfigError(f"parallel.{name}: needs parallel.checkpoint_activations; choose block or attention")

    @property
    def cut(self) -> Literal["rows", "parameters"]:
        """Where shards are cut: compression needs whole matrices."""
        return "rows" if self.compress == "none" else "parameters"

    def _check_use(self) -> None:
        """ConfigError for a setting that nothing uses. The default counts as not given."""
        compresses, is_local = self.compress != "none", self.local_steps > 0
        compress, local = "parallel.compress top_k or power_sgd", "parallel.local_steps"
        for name, is_used, needed in (
            ("compress_rank", self.compress == "power_sgd", "parallel.compress power_sgd"),
            ("compress_share", self.compress == "top_k", "parallel.compress top_k"),
            ("compress_feedback", compresses, compress),
            ("exact_steps", compresses or is_local, f"{compress}, or {local}"),
            ("outer", is_local, local),
            ("outer_lr", is_local and self.outer == "nesterov", f"{local} with parallel.outer nesterov"),
            ("outer_momentum", is_local and self.outer == "nesterov", f"{local} with parallel.outer nesterov"),
        ):
            if not is_used and getattr(self, name) != getattr(ParallelConfig, name):
                raise ConfigError(f"parallel.{name}: nothing uses it here; it needs {needed}")


class OptimNumbers(NamedTuple):
    """Numbers that suit one optimizer and not another."""

    lr: float
    weight_decay: float


OPTIM_DEFAULTS = {
    "adamw": OptimNumbers(3e-3, 0.1),
    "muon": OptimNumbers(3e-3, 0.1),
    "lamb": OptimNumbers(1e-2, 0.1),
    "lars": OptimNumbers(3.0, 1e-4),
    "sgd": OptimNumbers(0.3, 1e-4),
}
"""By optimizer. The learning rates are those of docs/optimizers.md (section Which learning rate)."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate: a linear warm-up, then a schedule."""

    name: Literal["adamw", "muon", "lamb", "lars", "sgd"] = "adamw"
    """The optimizer. muon updates the matrices of blocks, and AdamW the rest. sgd has Nesterov's momentum."""
    lr: float | None = None
    """Highest learning rate (default: 3e-3 of adamw and muon, 1e-2 of lamb, 0.3 of sgd, 3 of lars)."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by train.batch / optim.base_batch (linear: for sgd and lars), or by the root of it (sqrt: for the
    others)."""
    base_batch: int | None = None
    """With `lr_scaling`: the global batch, in sequences, for which optim.lr was chosen."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The learning rate after the warm-up. cosine, linear: it falls until the last step. wsd: it stays, and falls in the last part of
    the steps (warm-up, stable, decay). constant: it stays."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step, as a share of the highest; constant has none."""
    decay_ratio: float | None = None
    """With the schedule wsd: the share of the steps in which the learning rate falls (default: 0.2)."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises."""
    warmup_tokens: int = 0
    """Tokens over which the learning rate rises, rounded up to steps, in place of `warmup_steps`; 0: `warmup_steps` counts."""
    layer_decay: float = 1.0
    """The learning rate of the head is the whole one, and that of each layer below it is multiplied by this factor once more, down to
    the embedding. For fine-tuning."""
    momentum: float | None = None
    """Of sgd, lars and muon: the share of the momentum that a step keeps (default: 0.95 of muon, 0.9 of the others)."""
    matrix_lr: float | None = None
    """Of muon: the highest learning rate of the matrices (default: optim.lr)."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of muon: the dtype of the products of Newton-Schulz; auto: bfloat16 on GPUs and on CPUs with bf16 units."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of adamw, lamb and muon: decay factors of the running means of the gradients and of their squares."""
    eps: float = 1e-8
    """Small number that is added to the divisor; sgd has none."""
    weight_decay: float | None = None
    """Weight decay of matrices (default: 0.1 of adamw, muon and lamb; 1e-4 of sgd and lars, which add it to the gradient). Norms and
    biases do not decay."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient: a longer gradient is scaled down to it; 0 clips nothing."""

    def __post_init__(self) -> None:
        _expect("optim.lr", self.lr, 0)
        _expect("optim.min_lr_ratio", self.min_lr_ratio, 0, most=1)
        _expect("optim.warmup_steps", self.warmup_steps, 0)
        _expect("optim.warmup_tokens", self.warmup_tokens, 0)
        _expect("optim.base_batch", self.base_batch, 1)
        _expect("optim.momentum", self.momentum, 0, below=1)
        _expect("optim.matrix_lr", self.matrix_lr, 0)
        for name in ("layer_decay", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"optim.{name}: expected above 0 and at most 1, got {value}")
        for beta in self.betas:
            _expect("optim.betas", beta, 0, below=1)
        _expect("optim.eps", self.eps, 0)
        _expect("optim.weight_decay", self.weight_decay, 0)
        _expect("optim.clip_norm", self.clip_norm, 0)
        self._check_use()

    def _check_use(self) -> None:
        """ConfigError for a setting that the optimizer or the schedule does not use, or that needs another."""
        for name, optimizers in {
            "momentum": ("muon", "lars", "sgd"),
            "matrix_lr": ("muon",),
            "ns_dtype": ("muon",),
        }.items():
            if getattr(self, name) not in (None, "auto") and self.name not in optimizers:
                only = " or ".join(optimizers)
                raise ConfigError(f"optim.{name}: the optimizer {self.name} has none; choose --optim.name {only}")
        if self.matrix_lr is not None and self.lr == 0:
            raise ConfigError("optim.matrix_lr: expected optim.lr above 0, of which it is a multiple, got 0")
        if self.decay_ratio is not None and self.schedule != "wsd":
            raise ConfigError(f"optim.decay_ratio: the schedule {self.schedule} has none; choose --optim.schedule wsd")
        if (self.lr_scaling == "none") != (self.base_batch is None):
            given, other = ("base_batch", "lr_scaling") if self.lr_scaling == "none" else ("lr_scaling", "base_batch")
            raise ConfigError(f"optim.{given}: needs optim.{other}; set both, or none of them")

    def resolve(self) -> OptimNumbers:
        """The numbers that are given, and the optimizer's own for the others."""
        own = OPTIM_DEFAULTS[self.name]
        return OptimNumbers(
            own.lr if self.lr is None else self.lr,
            own.weight_decay if self.weight_decay is None else self.weight_decay,
        )


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
    over them in one order. Then losses and parameters have the same bits at any number of ranks up to this one; 0: off."""
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
    sample_bytes: int = 400
    """Length of the sample, a text that the model generates at the end of the run; 0: no sample."""
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
            _expect(f"train.{name}", getattr(self, name), 1)
        for name in (
            "copy_every",
            "max_skipped_steps",
            "max_rewinds",
            "spike_threshold",
            "check_every",
            "seed",
            "eval_every",
            "eval_batches",
            "sample_bytes",
            "sample_temperature",
        ):
            _expect(f"train.{name}", getattr(self, name), 0)
        if self.slices < 0 or self.slices & (self.slices - 1):
            raise ConfigError(f"train.slices: expected a power of two, or 0, got {self.slices}")
        if self.slices and self.batch % self.slices:
            raise ConfigError(
                f"train.batch: {self.batch} sequences do not make {self.slices} equal slices (train.slices); expected a multiple"
            )
        if self.slices and self.accumulate > 1:
            raise ConfigError(
                "train.accumulate: with train.slices the slices are the micro-batches; expected only one of the two"
            )
        if self.sample_bytes and not self.sample_prompt:
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

    def __post_init__(self) -> None:
        _expect("checkpoint.every", self.every, 0)
        _expect("checkpoint.keep", self.keep, 1)
        _expect("checkpoint.keep_every", self.keep_every, 0)
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


MOST_TRACED = 200
"""Steps of a trace. It grows by some MB of memory a step."""


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
        _expect("log.every", self.every, 1)
        _expect("log.layers_every", self.layers_every, 0)
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


def check_ranks(config: Config, num_ranks: int) -> None:
    """Check the settings that depend on the number of ranks.

    Raises:
        ConfigError: the global batch is not a multiple of data-parallel ranks x micro-batches (an elastic run without a pipeline needs
            only as many sequences); the ranks are not a multiple of copies x tensor x pipeline; steps are local with one copy;
            `tensor` ranks cannot share the model's heads, key and value heads, or context; or `pipeline` ranks cannot share its blocks,
            or run the schedule.
    """
    copies, tensor, pipeline = config.parallel.copies, config.parallel.tensor, config.parallel.pipeline
    if tensor * pipeline == 1 and num_ranks % copies:
        raise ConfigError(
            f"parallel.copies: {num_ranks} ranks do not make {copies} copies; take a divisor of {num_ranks}"
        )
    if num_ranks % (copies * tensor * pipeline):
        factors = {"copies": copies, "tensor": tensor, "pipeline": pipeline}
        used = [(name, size) for name, size in factors.items() if size > 1 or (name == "copies" and pipeline == 1)]
        raise ConfigError(
            f"parallel.{used[-1][0]}: {' x '.join(f'{size} (parallel.{name})' for name, size in used)} = "
            f"{copies * tensor * pipeline} does not divide {num_ranks} ranks"
        )
    if config.parallel.local_steps and copies == 1 and not config.train.elastic:  # a loss may leave one copy
        raise ConfigError(
            "parallel.local_steps: the model has one copy, so no step would be local; take a larger parallel.copies, such as the "
            "number of hosts"
        )
    _check_stages(config, num_ranks // (tensor * pipeline))
    sizes = config.model.resolve()
    if sizes.heads < tensor:
        raise ConfigError(f"parallel.tensor: {tensor} ranks cannot share {sizes.heads} heads (model.heads)")
    if isinstance(sizes, LlamaConfig) and (count := sizes.kv_heads) < sizes.heads:
        if sizes.heads % tensor:
            raise ConfigError(
                f"parallel.tensor: {tensor} ranks cannot share {sizes.heads} heads (model.heads) equally, which grouped queries "
                f"(model.kv_heads = {count}) need; take a divisor of {sizes.heads}"
            )
        if count % tensor and tensor % count:
            raise ConfigError(
                f"parallel.tensor: {tensor} ranks cannot share {count} key and value heads (model.kv_heads) equally; take a "
                f"divisor or a multiple of {count}"
            )
    if config.parallel.sequence and sizes.context % tensor:
        raise ConfigError(
            f"parallel.tensor: {tensor} ranks cannot share {sizes.context} tokens (model.context) equally; take a multiple, or "
            "--parallel.sequence false"
        )
    batch, accumulate = config.train.batch, config.train.accumulate
    factor = num_ranks // (tensor * pipeline) * accumulate
    if config.train.slices:
        if factor > config.train.slices:
            raise ConfigError(
                f"train.slices: {config.train.slices} slices are too few for {factor} ranks with different data, each of which trains "
                f"whole slices; expected at least {factor}"
            )
        return
    if config.train.elastic and pipeline == 1 and batch >= factor:
        return
    if batch % factor:
        fitting = [str(n) for n in (batch // factor * factor, (batch // factor + 1) * factor) if n]
        ranks = f"{num_ranks} ranks" + f" / {tensor} (parallel.tensor)" * (tensor > 1)
        ranks += f" / {pipeline} (parallel.pipeline)" * (pipeline > 1)
        raise ConfigError(
            f"train.batch: expected a multiple of {factor} = {ranks} x {accumulate} (train.accumulate), "
            f"got {batch}; nearest multiples: {' or '.join(fitting)}"
        )


def _check_stages(config: Config, num_data: int) -> None:
    """ConfigError if the settings make no pipeline. `num_data`: the ranks with different data."""
    parallel, train = config.parallel, config.train
    if parallel.pipeline == 1:
        return
    num_micro = train.micro_batches(num_data)
    try:
        schedule = make_schedule(parallel.schedule, parallel.pipeline, num_micro, parallel.stages_per_rank)
    except ValueError as error:
        remark = "train.accumulate is the number of micro-batches"
        if train.slices:
            remark = f"the slices of a rank (train.slices / {num_data}) are the micro-batches"
        raise ConfigError(f"parallel.schedule: {error}; {remark}") from None
    layers = config.model.resolve().layers
    if schedule.num_stages > layers + 1:  # the head may be a stage without a block
        raise ConfigError(
            f"parallel.pipeline: {schedule.num_stages} stages cannot share {layers} blocks (model.layers), of which each but the last "
            "needs one"
        )


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


def _expect(name: str, value: float | None, least: float, *, most: float = math.inf, below: float = math.inf) -> None:
    """Raise ConfigError unless the value is unset or a finite number in the range."""
    if value is None or (math.isfinite(value) and least <= value <= most and value < below):
        return
    limit = f" and at most {most}" if most < math.inf else f" and less than {below}" if below < math.inf else ""
    raise ConfigError(f"{name}: expected at least {least}{limit}, got {value}")
