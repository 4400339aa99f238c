"""How a run is spread over ranks (`RankLayout`), and what its software does that changes the price (`Software`)."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from mpitrain.stages.schedules import SCHEDULES, Schedule
from mpitrain.stages.schedules.dividing import divide
from mpitrain.tools.plan.transformer import Transformer

Recompute = Literal["none", "attention", "block"]


class RankLayout(NamedTuple):
    """The degrees of each kind of parallelism, and the division of a batch. The ranks of `tensor` are neighbours, then those of
    `context`, then those of `data`; the stages of a pipeline are farthest apart."""

    tensor: int = 1
    """Ranks that hold each layer together."""
    pipeline: int = 1
    """Ranks that have stages of one model, one after the other."""
    context: int = 1
    """Ranks that share a sequence."""
    experts: int = 1
    """Ranks, of `data` x `context`, that hold the experts of a layer together."""
    data: int = 1
    """Ranks that share the batch."""
    copies: int = 1
    """Copies of the shards; each is spread over `data` x `context` / `copies` ranks."""
    zero: int = 0
    """ZeRO stage."""
    schedule: str = "1f1b"
    """Of a pipeline: a name of `mpitrain.stages.schedules.SCHEDULES`."""
    stages_per_rank: int = 1
    """Of a pipeline."""
    micro: int = 1
    """Sequences of a micro-batch on one rank."""
    batch: int = 1
    """Sequences of a step: a multiple of `data` x `micro`."""
    sequence: bool = True
    """With `tensor`: the tokens between the cut matrices are shared, too."""
    recompute: Recompute = "none"
    """What is computed again in the backward."""
    resident: bool = False
    """The ranks of a node hold full parameters together, in shared memory."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def num_micro(self) -> int:
        """Micro-batches of a step on one rank."""
        return self.batch // (self.data * self.micro)

    @property
    def is_cut(self) -> bool:
        """Layers are cut over ranks, or in stages."""
        return self.tensor > 1 or self.pipeline > 1

    @property
    def shards(self) -> int:
        """Ranks over which one copy of parameters, gradients or optimizer state is spread, where ZeRO spreads it."""
        return self.data * self.context // self.copies

    @property
    def expert_shards(self) -> int:
        """As `shards`, for the parameters of experts, which fewer ranks share."""
        return max(1, self.shards // self.experts)

    def __str__(self) -> str:
        degrees = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.experts, "dp": self.data}
        return " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 rank"


@dataclass(frozen=True)
class Software:
    """Properties of a training program. They never depend on a single run. All are documented
    facts but `joins_adapters`, which is inferred from published times."""

    name: str
    fused_attention: bool = True
    """The scores of attention never reach memory, and the half of them that is masked is not computed (FlashAttention)."""
    dropout: bool = False
    """Dropout of the attention's and of the blocks' outputs."""
    fused_norms: bool = True
    """RMS norms keep their input alone for the backward; else also the input divided by its norm."""
    keeps_gathered: bool = False
    """With sequence parallelism, the gathered inputs of matrices are kept for the backward; else the backward gathers them again."""
    recomputes_projections: bool = True
    """Recomputation of attention includes the matrices before and after it; else only its core."""
    grad_bytes: int = 4
    """Bytes of a number in the reductions of gradients."""
    overlaps_gradients: bool = True
    """Reductions of gradients run beside the backward, if there is no pipeline."""
    overlaps_under_pipeline: bool = True
    """Reductions of gradients also run beside the backward of a pipeline."""
    reduces_each_micro_batch: bool = True
    """Without a pipeline, gradients are reduced in each micro-batch; else once a step, and full gradients are kept until then."""
    overlaps_gathers: bool = True
    """Gathers of parameters (ZeRO-3) run beside forward and backward."""
    gathers_each_forward: bool = False
    """In ZeRO stages 1 and 2 each micro-batch begins with a gather of parameters; else only the first one of a step."""
    recomputes_last: bool = True
    """Recomputation includes the last product of what is computed again, although the backward does not need its result."""
    overlaps_messages: bool = True
    """Messages between stages of a pipeline run beside computation."""
    sends_parts: bool = False
    """Without sequence parallelism, each rank of a tensor-parallel group sends a part of the message between stages."""
    balances_stages: bool = True
    """The head and the embedding count when layers are dealt to stages."""
    joins_adapters: bool = True
    """A group with several ranks on each node uses the network adapters of all of them."""

    sequence: bool = True
    """It has sequence parallelism with tensor parallelism."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """The ZeRO stages that it has."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """The schedules of pipelines that it has."""
    interleaved: tuple[int, ...] = (2,)
    """The numbers of stages of a rank that its schedule `interleaved` has."""
    recompute: tuple[Recompute, ...] = ("none", "attention", "block")
    """The kinds of recomputation that it has."""

    lacks: tuple[str, ...] = ("context", "experts")
    """Degrees that are estimated, although the program does not have them: fields of a `RankLayout`."""

    def overlaps(self, layout: RankLayout) -> bool:
        """Whether reductions of gradients run beside the backward."""
        return self.overlaps_gradients and (layout.pipeline == 1 or self.overlaps_under_pipeline)


MPITRAIN = Software(
    "mpitrain",
    fused_norms=False,
    keeps_gathered=True,
    interleaved=(2, 3, 4),  # parallel.stages_per_rank
    gathers_each_forward=True,  # sharding/step/step.py: `begin_pass` marks full parameters as expired
    recomputes_last=False,  # torch's checkpoint stops when it has all tensors that the backward needs
)
"""This library, as docs/sharding.md and docs/parallel.md describe it."""
MEGATRON_2021 = Software(
    "Megatron-LM 2.2",
    fused_attention=False,
    dropout=True,
    recomputes_projections=False,
    grad_bytes=2,  # examples/sc21/CONFIG.sh: --fp16 without --accumulate-allreduce-grads-in-fp32
    overlaps_under_pipeline=False,  # examples/sc21/run_table_1.sh: --DDP-impl torch without a pipeline, else --DDP-impl local
    reduces_each_micro_batch=False,  # megatron/schedules.py: no_sync for all micro-batches but the last
    overlaps_messages=False,  # megatron/p2p_communication.py: each exchange is waited for
    joins_adapters=False,  # see docs/plan.md: NCCL of that time, from table 2's ZeRO-3 rows and figure 13
    sends_parts=True,  # the scatter/gather optimization, section 4.1 of 2104.04473
    balances_stages=False,  # megatron/model/transformer.py: each stage has num_layers / stages layers
    sequence=False,
    zero=(0,),
    schedules=("gpipe", "1f1b", "interleaved"),
    interleaved=(2, 3, 4, 6, 8),
    recompute=("none", "block"),
)
"""Megatron-LM at the time of 2104.04473. With --DDP-impl torch, torch's DistributedDataParallel reduces gradients beside the last
backward. With --DDP-impl local, Megatron's own reduces them after it."""
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 3.0", sequence=True, recompute=("none", "attention", "block"))
"""Megatron-LM at the time of 2205.05198, which adds sequence parallelism and selective recomputation."""
DEEPSPEED_2021 = Software(
    "DeepSpeed 0.3",
    fused_attention=False,
    dropout=True,
    recomputes_projections=False,
    grad_bytes=2,
    joins_adapters=False,
    sequence=False,
    schedules=(),
    recompute=("none", "block"),
)
"""DeepSpeed's ZeRO-3 at the time of 2104.04473, in Megatron's model. It gathers each parameter by itself."""
LLAMA_2024 = Software(
    "Llama 3's trainer", zero=(2,), schedules=("interleaved",), interleaved=(2, 4, 8), lacks=("experts",)
)
"""Section 3.3.2 of 2407.21783: FSDP, gradients reduced in fp32, messages between stages in the background, one layer fewer on the
first and on the last stage."""

NAMED = {"mpitrain": MPITRAIN, "megatron-2021": MEGATRON_2021, "megatron-2022": MEGATRON_2022, "llama-2024": LLAMA_2024}
"""The programs that `--software` takes by name."""


@lru_cache(maxsize=65536)
def scheduled(name: str, ranks: int, num_micro: int, stages_per_rank: int) -> Schedule:
    """A schedule of a pipeline; ValueError where it is not defined."""
    return SCHEDULES[name](ranks, num_micro, *([stages_per_rank] if name == "interleaved" else []))


def stage_blocks(model: Transformer, software: Software, layout: RankLayout) -> tuple[int, ...]:
    """The number of blocks of each stage of the pipeline. Programs that do not balance stages have as many blocks in all of them."""
    count = layout.pipeline * layout.stages_per_rank
    if not software.balances_stages:
        return (math.ceil(model.layers / count),) * count
    return _dealt(model.layers, model.block_parameters - model.vectors, model.vocab * model.width, count)


@lru_cache(maxsize=4096)
def _dealt(layers: int, block: int, head: int, stages: int) -> tuple[int, ...]:
    """As the trainer deals blocks to stages. `block`, `head`: their parameters in matrices. With few layers the first stages, and the
    last one, have none."""
    divided = divide(0.0, [float(block)] * layers, float(head), min(stages, layers + 1))
    return (0,) * (stages - len(divided)) + tuple(len(own) for own in divided)


def rank_blocks(model: Transformer, software: Software, layout: RankLayout) -> tuple[int, ...]:
    """The number of blocks of each rank of the pipeline. ValueError for a schedule that is not defined for these numbers."""
    if layout.pipeline == 1:
        return (model.layers,)
    of = (layout.schedule, layout.pipeline, layout.num_micro, layout.stages_per_rank)
    return _of_ranks(stage_blocks(model, software, layout), *of)


@lru_cache(maxsize=65536)
def _of_ranks(blocks: tuple[int, ...], name: str, ranks: int, num_micro: int, stages_per_rank: int) -> tuple[int, ...]:
    schedule, made = scheduled(name, ranks, num_micro, stages_per_rank), [0] * ranks
    for stage, own in enumerate(blocks):
        made[schedule.rank_of(stage)] += own
    return tuple(made)


class HeldParameters(NamedTuple):
    """Parameters of a rank, before ZeRO spreads them."""

    dense: float
    """Those of which all `data` x `context` ranks have copies."""
    experts: float
    """Those of experts: `data` x `context` / `experts` ranks have the same ones."""

    @property
    def all(self) -> float:
        return self.dense + self.experts

    def own(self, layout: RankLayout) -> float:
        """Those that one rank updates."""
        if not layout.zero:
            return self.all
        return self.dense / layout.shards + self.experts / layout.expert_shards


def held(model: Transformer, layout: RankLayout, blocks: int, *, has_embedding: bool, has_head: bool) -> HeldParameters:
    """The parameters of a rank of a pipeline with this number of blocks. Tied embeddings are on the first and on the last stage."""
    router = model.experts * model.width if model.experts > 1 else 0
    feed_forward = model.experts * model.expert_matrices / layout.experts / layout.tensor
    of_block = model.attention_matrices / layout.tensor + router + model.vectors
    matrices = min(has_embedding + has_head, 1 if model.tied else 2)
    dense = blocks * of_block + matrices * model.vocab * model.width / layout.tensor
    dense += has_embedding * model.positions * model.width
    if model.experts == 1:
        return HeldParameters(dense + blocks * feed_forward, 0.0)
    return HeldParameters(dense, blocks * feed_forward)


def candidates(model: Transformer, software: Software, layout: RankLayout) -> dict[int, HeldParameters]:
    """Parameters of the ranks of a pipeline of which one holds most: the first, the one with most blocks, and that of the head."""
    blocks = rank_blocks(model, software, layout)
    last = 0
    if layout.pipeline > 1:
        schedule = scheduled(layout.schedule, layout.pipeline, layout.num_micro, layout.stages_per_rank)
        last = schedule.rank_of(schedule.num_stages - 1)
    return {
        rank: held(model, layout, blocks[rank], has_embedding=rank == 0, has_head=rank == last)
        for rank in sorted({0, blocks.index(max(blocks)), last})
    }


def rank_parameters(model: Transformer, software: Software, layout: RankLayout) -> HeldParameters:
    """Parameters of the rank of a pipeline that has most."""
    return max(candidates(model, software, layout).values(), key=lambda of: of.all)
