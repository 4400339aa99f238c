"""The settings of the section [parallel]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mpitrain.job.config.errors import ConfigError, expect

Dtype = Literal["float32", "bfloat16", "float16"]
Wire = Literal["fp32", "bf16", "fp16", "int8", "fp8", "auto"]


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
    """Compute activations again in the backward: those of each block (less memory for large models, about a third more time), or of
    each block's attention alone."""
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
        expect("parallel.threads", self.threads, 1)
        expect("parallel.copies", self.copies, 1)
        expect("parallel.compress_rank", self.compress_rank, 1)
        expect("parallel.compress_share", self.compress_share, 1e-6, below=0.5)
        if self.compress != "none" and self.local_steps:
            raise ConfigError(
                "parallel.local_steps: local steps send no gradients to compress; choose parallel.compress none"
            )
        if self.compress != "none" and self.stage > 0 and self.copies == 1:
            raise ConfigError(
                f"parallel.compress: {self.compress} needs whole matrices, and stage {self.stage} cuts them; choose "
                "--parallel.stage 0, or several --parallel.copies"
            )
        expect("parallel.local_steps", self.local_steps, 0)
        expect("parallel.exact_steps", self.exact_steps, 0)
        expect("parallel.outer_momentum", self.outer_momentum, 0, below=1)
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"parallel.outer_lr: expected a number above 0, got {self.outer_lr}")
        expect("parallel.tensor", self.tensor, 1)
        expect("parallel.pipeline", self.pipeline, 1)
        if self.stages_per_rank is not None:
            expect("parallel.stages_per_rank", self.stages_per_rank, 2, most=4)
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
