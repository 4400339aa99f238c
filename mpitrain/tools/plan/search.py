"""All layouts of a model on a number of ranks that make sense, and the fastest that fit."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.footprint import footprint
from mpitrain.tools.plan.layout import RankLayout, Software, rank_blocks
from mpitrain.tools.plan.price import Price, price
from mpitrain.tools.plan.transformer import Transformer

MAX_MICRO = 32
"""Sequences of a micro-batch at most."""
MIN_CONTEXT_TOKENS = 4096
"""Tokens of a rank at least, if ranks share a sequence: fewer make attention and its messages inefficient."""


_LACKED = {"context": "context parallelism", "experts": "expert parallelism"}


@dataclass(frozen=True)
class PlanJob:
    """What is to be trained on what. `batch`: sequences of a step. `fixed`: fields of a `RankLayout` that have one value only.

    Raises:
        ValueError: fewer than one rank or sequence.
    """

    model: Transformer
    machine: Machine
    software: Software
    ranks: int
    batch: int
    fixed: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.model.context

    @property
    def room(self) -> float:
        """Bytes that tensors of a rank can have."""
        return self.machine.memory * self.machine.efficiency.memory


@dataclass(frozen=True)
class LayoutPlan:
    """A layout with what it takes."""

    job: PlanJob
    layout: RankLayout
    footprint: dict[str, float]

    @cached_property
    def nbytes(self) -> float:
        """Of one rank."""
        return sum(self.footprint.values())

    @property
    def lacks_bytes(self) -> float:
        """Bytes that a rank lacks; 0 or less if the plan fits."""
        return self.nbytes - self.job.room

    @cached_property
    def price(self) -> Price:
        return price(self.job.model, self.job.machine, self.job.software, self.layout)

    @property
    def step_s(self) -> float:
        return self.price.step_s

    @property
    def lacks(self) -> str:
        """What the program lacks to run this layout; empty if it has all."""
        return " and ".join(_LACKED[name] for name in self.job.software.lacks if getattr(self.layout, name) > 1)

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """The model's FLOP/s utilisation, of the machine's peak."""
        return self.job.model.flops_per_token * self.tokens_per_s / (self.job.ranks * self.job.machine.flops)

    def days(self, tokens: float) -> float:
        """To train on this number of tokens."""
        return tokens / self.tokens_per_s / 86400

    def cost(self, tokens: float, price_per_hour: float) -> float:
        """Of training on this number of tokens, at a price of one rank."""
        return self.days(tokens) * 24 * self.job.ranks * price_per_hour


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `fitting`: fastest first. `num_layouts`: all that were considered."""

    job: PlanJob
    fitting: list[LayoutPlan]
    too_large: list[LayoutPlan]

    @property
    def num_layouts(self) -> int:
        return len(self.fitting) + len(self.too_large)

    @property
    def best(self) -> LayoutPlan | None:
        """The fastest that the program can run."""
        return next((plan for plan in self.fitting if not plan.lacks), None)


def search(job: PlanJob) -> SearchResult:
    """Consider all layouts that make sense.

    Raises:
        ValueError: no layout is possible at all.
    """
    fitting: list[LayoutPlan] = []
    too_large: list[LayoutPlan] = []
    for layout in layouts(job):
        try:
            plan = LayoutPlan(job, layout, footprint(job.model, job.machine, job.software, layout))
        except ValueError:  # the schedule is not defined for these numbers
            continue
        (too_large if plan.lacks_bytes > 0 else fitting).append(plan)
    if not fitting and not too_large:
        given = "".join(f", {name} {value}" for name, value in job.fixed)
        raise ValueError(
            f"no layout of {job.model.name} on {job.ranks} ranks with a batch of {job.batch} sequences{given}: {_why_none(job)}"
        )
    # Equal times: less memory first.
    fitting.sort(key=lambda plan: (plan.step_s, plan.nbytes))
    return SearchResult(job, fitting, too_large)


def _why_none(job: PlanJob) -> str:
    """Which option leaves no layout, and its possible values."""
    fixed = dict(job.fixed)
    if "schedule" in fixed and fixed.get("pipeline") == 1:
        return "a schedule needs a pipeline; choose another --pipeline, or leave out --schedule"
    for name in fixed:
        others = tuple(item for item in job.fixed if item[0] != name)
        if values := _values(replace(job, fixed=others), name):
            flag = "context-ranks" if name == "context" else name.replace("_", "-")
            return f"with the other options {job.software.name} can have --{flag} {', '.join(map(str, values))}"
    if fixed and _values(replace(job, fixed=()), "data"):
        return "these options exclude each other; leave some out"
    return (
        "the batch must be a multiple of the data-parallel ranks, and the model must have a block for each stage; choose another "
        "--batch or --ranks"
    )


def _values(job: PlanJob, name: str) -> list[Any]:
    """The values of a field in all layouts that are possible."""
    values = set()
    for layout in layouts(job):
        if getattr(layout, name) not in values and _is_defined(job, layout):
            values.add(getattr(layout, name))
    return sorted(values)


def _is_defined(job: PlanJob, layout: RankLayout) -> bool:
    try:
        rank_blocks(job.model, job.software, layout)
    except ValueError:
        return False
    return True


def layouts(job: PlanJob) -> Iterator[RankLayout]:
    """All layouts that make sense, each once."""
    fixed = dict(job.fixed)

    def of(name: str, values: list[Any]) -> list[Any]:
        return [value for value in values if name not in fixed or fixed[name] == value]

    for tensor in of("tensor", _tensor_degrees(job)):
        for pipeline in of("pipeline", _divisors(job.ranks // tensor)):
            rest = job.ranks // tensor // pipeline
            for context in of("context", _context_degrees(job, tensor, rest)):
                data = rest // context
                if job.batch % data:
                    continue
                for micro in of("micro", [m for m in _divisors(job.batch // data) if m <= MAX_MICRO]):
                    for schedule, chunks in _schedules(job, pipeline, job.batch // data // micro):
                        if of("schedule", [schedule]) and of("stages_per_rank", [chunks]):
                            one = RankLayout(
                                tensor=tensor,
                                pipeline=pipeline,
                                context=context,
                                data=data,
                                schedule=schedule,
                                stages_per_rank=chunks,
                                micro=micro,
                                batch=job.batch,
                                sequence=job.software.sequence and tensor > 1,
                            )
                            yield from _states(job, one, of)


def _tensor_degrees(job: PlanJob) -> list[int]:
    model = job.model
    return [
        degree
        for degree in _divisors(job.ranks)
        # Beyond two nodes the exchanges in each block take longer than the block.
        if degree <= 2 * job.machine.ranks_per_node
        and model.heads % degree == 0
        and (model.kv_heads % degree == 0 or degree % model.kv_heads == 0)
        and model.context % degree == 0
    ]


def _context_degrees(job: PlanJob, tensor: int, rest: int) -> list[int]:
    most = max(1, job.model.context // MIN_CONTEXT_TOKENS)
    return [degree for degree in _divisors(rest) if degree <= most and job.model.context % (degree * tensor) == 0]


def _schedules(job: PlanJob, pipeline: int, num_micro: int) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        yield "1f1b", 1
        return
    for name in job.software.schedules:
        counts = {"interleaved": job.software.interleaved, "zb-v": (2,), "dualpipe-v": (2,)}.get(name, (1,))
        for count in counts:
            stages, layers = pipeline * count, job.model.layers
            # If a program balances stages, the last one may have the head alone.
            if stages <= layers + 1 if job.software.balances_stages else layers % stages == 0:
                yield name, count


def _states(job: PlanJob, one: RankLayout, of: Callable[[str, list[Any]], list[Any]]) -> Iterator[RankLayout]:
    """The layouts that differ from `one` in what is kept where."""
    ranks, software = one.data * one.context, job.software
    expert_degrees = [e for e in _divisors(ranks) if job.model.experts % e == 0] if job.model.experts > 1 else [1]
    for experts in of("experts", expert_degrees):
        for zero in of("zero", [stage for stage in software.zero if ranks > 1 or stage == 0]):
            for copies in of("copies", _copies(job, one, zero)):
                for resident in of("resident", [True, False] if job.machine.shares_memory and zero else [False]):
                    for recompute in of("recompute", list(software.recompute)):
                        yield one._replace(
                            experts=experts, zero=zero, copies=copies, resident=resident, recompute=recompute
                        )


def _copies(job: PlanJob, one: RankLayout, zero: int) -> list[int]:
    """One copy over all ranks, or one copy on the ranks of each node."""
    ranks = one.data * one.context
    on_node = job.machine.ranks_per_node // one.tensor
    if zero == 0 or on_node < 2 or ranks <= on_node or ranks % on_node:
        return [1]
    return [1, ranks // on_node]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
