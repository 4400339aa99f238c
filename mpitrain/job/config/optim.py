"""The settings of the section [optim], and the numbers that suit each optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from mpitrain.job.config.errors import ConfigError, expect


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
        expect("optim.lr", self.lr, 0)
        expect("optim.min_lr_ratio", self.min_lr_ratio, 0, most=1)
        expect("optim.warmup_steps", self.warmup_steps, 0)
        expect("optim.warmup_tokens", self.warmup_tokens, 0)
        expect("optim.base_batch", self.base_batch, 1)
        expect("optim.momentum", self.momentum, 0, below=1)
        expect("optim.matrix_lr", self.matrix_lr, 0)
        for name in ("layer_decay", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"optim.{name}: expected above 0 and at most 1, got {value}")
        for beta in self.betas:
            expect("optim.betas", beta, 0, below=1)
        expect("optim.eps", self.eps, 0)
        expect("optim.weight_decay", self.weight_decay, 0)
        expect("optim.clip_norm", self.clip_norm, 0)
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
