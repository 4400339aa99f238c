"""Tables of papers as data: what was run, and what was measured. `compare` prices each row.

All rows of all tables of one machine use the constants of that machine's file. The software of a table is one `Software`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpitrain.job.record.machine import machine as machines
from mpitrain.tools.plan.layout import DEEPSPEED_2021, LLAMA_2024, MEGATRON_2021, MEGATRON_2022, RankLayout, Software
from mpitrain.tools.plan.price import Price, price
from mpitrain.tools.plan.transformer import NAMED, Transformer, gpt


class Row(NamedTuple):
    """One row of a table. `value`: what the paper states, in the unit of the table."""

    name: str
    model: Transformer
    layout: RankLayout
    value: float
    software: Software


@dataclass(frozen=True)
class Table:
    """A table of a paper. `of(row, price)`: the predicted value, in the table's unit."""

    name: str
    source: str
    unit: str
    machine: str
    of: Callable[[Row, Price], float]
    rows: tuple[Row, ...]


class Compared(NamedTuple):
    """A row and its prediction."""

    row: Row
    price: Price
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.value - 1


def compare(table: Table, machine: machines.Machine | None = None) -> list[Compared]:
    """Price the rows of a table, on its machine or on another one."""
    on = machine or machines.load(table.machine)
    priced = [(row, price(row.model, on, row.software, row.layout)) for row in table.rows]
    return [Compared(row, of, table.of(row, of)) for row, of in priced]


def _tflops_with_recompute(row: Row, of: Price) -> float:
    """Equation 3 of 2104.04473: a GPT's operations with one more forward."""
    m, s, h = row.model, row.model.context, row.model.width
    flops = 96 * row.layout.batch * s * m.layers * h * h * (1 + s / (6 * h) + m.vocab / (16 * m.layers * h))
    return flops / of.step_s / row.layout.ranks / 1e12


def _tflops(row: Row, of: Price) -> float:
    """The operations of the model, of attention those that causal attention needs."""
    m = row.model
    flops = m.flops_per_token - 6 * m.layers * m.heads * m.head_width * m.context
    return flops * m.context * row.layout.batch / of.step_s / row.layout.ranks / 1e12


def _seconds(row: Row, of: Price) -> float:
    return of.step_s


def _narayanan_1() -> tuple[Row, ...]:
    """Micro-batches and stages: examples/sc21/run_table_1.sh of Megatron-LM. TFLOP/s of a GPU: the paper."""
    rows = [  # name, layers, width, heads, tensor, pipeline, stages of a rank, micro-batch, nodes, batch, TFLOP/s
        ("1.7B", 24, 2304, 24, 1, 1, 1, 16, 4, 512, 137),
        ("3.6B", 30, 3072, 32, 2, 1, 1, 16, 8, 512, 138),
        ("7.5B", 36, 4096, 32, 4, 1, 1, 16, 16, 512, 142),
        ("18B", 40, 6144, 48, 8, 1, 1, 8, 32, 1024, 135),
        ("39B", 48, 8192, 64, 8, 2, 1, 4, 64, 1536, 138),
        ("76B", 60, 10240, 80, 8, 4, 3, 2, 128, 1792, 140),
        ("145B", 80, 12288, 96, 8, 8, 2, 2, 192, 2304, 148),
        ("310B", 96, 16384, 128, 8, 16, 2, 1, 240, 2160, 155),
        ("530B", 105, 20480, 128, 8, 35, 3, 1, 315, 2520, 163),
        ("1T", 128, 25600, 160, 8, 64, 1, 1, 384, 3072, 163),
    ]
    return tuple(
        Row(name, gpt(name, layers, h, a), _megatron(t, p, v, micro, batch, 8 * nodes), tflops, MEGATRON_2021)
        for name, layers, h, a, t, p, v, micro, nodes, batch, tflops in rows
    )


def _megatron(t: int, p: int, v: int, micro: int, batch: int, gpus: int) -> RankLayout:
    return RankLayout(
        tensor=t,
        pipeline=p,
        data=gpus // (t * p),
        schedule="interleaved" if v > 1 else "1f1b",
        stages_per_rank=v,
        micro=micro,
        batch=batch,
        sequence=False,
        recompute="block",
    )


def _narayanan_2() -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """The rows of PTD-P, without interleaving (see docs/plan.md), and those of ZeRO-3."""
    rows = [  # model, GPUs, batch, TFLOP/s of PTD-P
        ("gpt3-175b", 12, 384, 1536, 153),
        ("gpt3-175b", 12, 768, 1536, 149),
        ("gpt3-175b", 12, 1536, 1536, 141),
        ("gpt-530b", 35, 560, 2240, 171),
        ("gpt-530b", 35, 1120, 2240, 167),
        ("gpt-530b", 35, 2240, 2240, 159),
    ]
    zero = [  # model, GPUs, micro-batch, batch, TFLOP/s of ZeRO-3
        ("gpt3-175b", 384, 4, 1536, 144),
        ("gpt3-175b", 768, 2, 1536, 88),
        ("gpt3-175b", 1536, 1, 1536, 44),
        ("gpt-530b", 640, 4, 2560, 138),
        ("gpt-530b", 1120, 2, 2240, 98),
        ("gpt-530b", 2240, 1, 2240, 48),
    ]
    ptd = tuple(
        Row(
            f"{name.partition('-')[2].upper()}, {gpus} GPUs",
            NAMED[name],
            _megatron(8, p, 1, 1, batch, gpus),
            tflops,
            MEGATRON_2021,
        )
        for name, p, gpus, batch, tflops in rows
    )
    return ptd, tuple(
        Row(
            f"{name.partition('-')[2].upper()}, {gpus} GPUs",
            NAMED[name],
            RankLayout(data=gpus, zero=3, micro=micro, batch=batch, sequence=False, recompute="block"),
            tflops,
            DEEPSPEED_2021,
        )
        for name, gpus, micro, batch, tflops in zero
    )


def _korthikanti_5() -> tuple[Row, ...]:
    """Models and layouts: table 3 of the paper. Stages of a rank: section 6."""
    # Layers, width, heads, pipeline, stages of a rank, micro-batch, batch, seconds with full recomputation, and with the paper's.
    rows = [
        ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
    ]
    made = []
    for name, layers, h, a, p, v, micro, batch, full, present in rows:
        layout = _megatron(8, p, v, micro, batch, 8 * p)
        model = gpt(name, layers, h, a)
        made.append(Row(f"{name}, full recomputation", model, layout, full, MEGATRON_2022))
        selective = layout._replace(sequence=True, recompute="attention")
        made.append(Row(f"{name}, selective, sequence parallel", model, selective, present, MEGATRON_2022))
    return tuple(made)


def _days(row: Row, of: Price) -> float:
    """For 300 billion tokens."""
    return 300e9 / (row.layout.batch * row.model.context / of.step_s) / 86400


def _llama_4() -> tuple[Row, ...]:
    rows = [(8192, 1, 64, 8192, 32, 430), (16384, 1, 128, 8192, 16, 400), (16384, 16, 8, 131072, 16, 380)]
    model = NAMED["llama3-405b"]
    return tuple(
        Row(
            f"{gpus:,} GPUs, {context // 1024}k tokens",
            replace(model, context=context),
            RankLayout(
                tensor=8,
                pipeline=16,
                context=cp,
                data=data,
                zero=2,
                schedule="interleaved",
                stages_per_rank=8,
                batch=batch * data,
            ),
            tflops,
            LLAMA_2024,
        )
        for gpus, cp, data, context, batch, tflops in rows
    )


NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473"
_PTD, _ZERO = _narayanan_2()
# Section 5.1 states 34 days for 1,024 GPUs and a batch of 1,536, at 140 TFLOP/s a GPU, and no layout. This one has tensor parallelism
# within the node, stages that fit memory, and no interleaving, as in table 2.
_GPT3 = Row("GPT-3 175B, 300 B tokens", NAMED["gpt3-175b"], _megatron(8, 8, 1, 1, 1536, 1024), 34, MEGATRON_2021)

TABLES = (
    Table("Narayanan 2021, table 1", NARAYANAN, "TFLOP/s", "a100", _tflops_with_recompute, _narayanan_1()),
    Table("Narayanan 2021, table 2, PTD-P", NARAYANAN, "TFLOP/s", "a100", _tflops_with_recompute, _PTD),
    Table("Narayanan 2021, table 2, ZeRO-3", NARAYANAN, "TFLOP/s", "a100", _tflops_with_recompute, _ZERO),
    Table("Narayanan 2021, section 5.1", NARAYANAN, "days", "a100", _days, (_GPT3,)),
    Table(
        "Korthikanti 2022, table 5",
        "Korthikanti et al. 2022, arXiv 2205.05198",
        "s",
        "a100",
        _seconds,
        _korthikanti_5(),
    ),
    Table("Llama 3 405B, table 4", "Llama team 2024, arXiv 2407.21783", "TFLOP/s", "h100", _tflops, _llama_4()),
)
"""TFLOP/s are those of one GPU."""


class Choice(NamedTuple):
    """A figure of a paper that compares layouts. `best`: the name of the layout that was the fastest."""

    name: str
    machine: str
    model: Transformer
    layouts: dict[str, RankLayout]
    best: str
    software: Software


class Chosen(NamedTuple):
    """The layout that is predicted to be the fastest, and by how much it is faster than the paper's."""

    choice: Choice
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def excess(self) -> float:
        """The predicted time of the paper's best layout over that of the predicted best, minus 1."""
        return self.seconds[self.choice.best] / self.seconds[self.best] - 1


def choose(choice: Choice) -> Chosen:
    """Price all layouts of a figure."""
    on = machines.load(choice.machine)
    priced = {name: price(choice.model, on, choice.software, layout) for name, layout in choice.layouts.items()}
    return Chosen(choice, {name: of.step_s for name, of in priced.items()})


def _choices() -> Iterator[Choice]:
    """Models and layouts: examples/sc21/run_figure_13.sh and run_figure_16.sh of Megatron-LM."""
    for batch in (32, 128):
        of_degrees = {
            f"tensor {64 // p}, pipeline {p}": _megatron(64 // p, p, 1, 1, batch, 64) for p in (2, 4, 8, 16, 32)
        }
        name = f"Narayanan 2021, figure 13, batch {batch}"
        yield Choice(name, "a100", gpt("162B", 32, 20480, 128), of_degrees, "tensor 8, pipeline 8", MEGATRON_2021)
    for batch in (128, 512):
        of_sizes = {f"micro-batch {micro}": _megatron(8, 8, 1, micro, batch, 64) for micro in (1, 2, 4, 8)}
        name = f"Narayanan 2021, figure 16, batch {batch}"
        yield Choice(name, "a100", gpt("91B", 32, 15360, 128), of_sizes, "micro-batch 2", MEGATRON_2021)


CHOICES = tuple(_choices())
