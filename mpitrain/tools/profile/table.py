"""The tables of a profile, for a terminal or a file. Pure: no torch, no MPI."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from collectives.shared.tables import new_table, plural
from collectives.texts import shown
from mpitrain.tools.profile.memory_kinds import KINDS as MEMORY_KINDS
from mpitrain.tools.profile.memory_kinds import HeldMemory
from mpitrain.tools.profile.parts import KINDS, LAYERS, Parts
from mpitrain.tools.profile.places import BLOCK

_MOST_COLUMNS = 8  # ranks that have a column each


def tables(parts: Parts, held: Sequence[HeldMemory], *, every_block: bool) -> Iterator[RenderableType]:
    """Of the layers, of the ranks if there are several, and of the memory. `held`: of each rank."""
    yield of_layers(parts, every_block=every_block)
    if parts.num_ranks > 1:
        yield of_ranks(parts)
    yield of_memory(held, every_block=every_block)


def of_layers(parts: Parts, *, every_block: bool, of: str = "") -> Table:
    """Where the time of a step goes: the mean of the ranks. Its last column is the share of the step. `of`: stands before the title."""
    kinds = [kind for kind in KINDS if any(parts.of_kind(kind))]
    table = new_table(
        ["", *(f"{kind} ms" for kind in kinds), "all ms", "share"],
        title=f"{of}a step of {parts.step_s * 1e3:,.1f} ms, mean of {plural(parts.num_ranks, 'rank')} in "
        + plural(parts.num_steps, "step"),
    )

    def add(layer: str, name: str, style: str = "") -> None:
        own = [fmean(parts.of(layer, kind)) for kind in kinds]
        table.add_row(name, *map(_ms, own), _ms(sum(own)), f"{sum(own) / parts.step_s:.1%}", style=style)

    for layer, name in LAYERS.items():
        if layer == "blocks" and parts.blocks:
            add(layer, plural(len(parts.blocks), "block"))
            slowest = slowest_block(parts)
            for block in parts.blocks if every_block else [slowest] if len(parts.blocks) > 1 else []:
                add(block, f"  {block}" + " (slowest)" * (block == slowest), style="dim")
        elif layer in parts.layers:
            add(layer, name)
    table.add_section()
    sums = [fmean(parts.of_kind(kind)) for kind in kinds]
    table.add_row("step", *map(_ms, sums), _ms(sum(sums)), "100.0%")
    return table


def slowest_block(parts: Parts) -> str:
    """The block whose forward and backward take longest on any rank."""

    def computed(block: str) -> float:
        return max(a + b for a, b in zip(parts.of(block, "forward"), parts.of(block, "backward"), strict=True))

    return max(parts.blocks, key=computed)


_RANK_ROWS = {
    "forward": ("forward", None),
    "backward": ("backward", None),
    "optimizer": ("own work", ("optimizer",)),
    "data": ("own work", ("data",)),
    "other own work": ("own work", tuple(layer for layer in LAYERS if layer not in ("optimizer", "data"))),
    "communication": ("transfer", None),
    "waits for ranks": ("wait", tuple(layer for layer in LAYERS if layer != "other stages")),
    "waits for stages": ("wait", ("other stages",)),
}
"""They add up to the step."""


def of_ranks(parts: Parts) -> Table:
    """The kinds of work of each rank; of many ranks the least, the median and the most."""
    is_wide = parts.num_ranks > _MOST_COLUMNS
    ranks = [
        f"rank {rank}" + (f" (stage {stage})" if max(parts.stages) else "") for rank, stage in enumerate(parts.stages)
    ]
    headings = ["least ms", "median ms", "most ms", "on"] if is_wide else [f"{rank} ms" for rank in ranks]
    table = new_table(["", *headings], title="by rank")
    rows = {}
    for name, (kind, layers) in _RANK_ROWS.items():
        rows[name] = parts.of_kind(kind) if layers is None else parts.of_kind(kind, layers)
    rows["step"] = parts.of_ranks
    rows["hidden by computing"] = parts.hidden
    for name, row in rows.items():
        if not any(row):
            continue
        if name == "step":
            table.add_section()
        if is_wide:
            table.add_row(name, _ms(min(row)), _ms(median(row)), _ms(max(row)), ranks[row.index(max(row))])
        else:
            table.add_row(name, *map(_ms, row))
    return table


def of_memory(held: Sequence[HeldMemory], *, every_block: bool) -> Table:
    """The memory of the rank that has most, at its peak."""
    rank = max(range(len(held)), key=lambda rank: held[rank].peak)
    of = held[rank]
    table = new_table(
        ["", *(f"{kind} MB" for kind in MEMORY_KINDS), "all MB"],
        title=escape(shown(f"memory of rank {rank} at its peak of {of.peak / 1e6:,.0f} MB, {of.moment}")),
    )
    blocks = [name for name in of.layers if name.startswith(BLOCK)]
    has_sum = len(blocks) > 1 and not every_block
    for name, kinds in of.layers.items():
        if has_sum and name in blocks:
            if name == blocks[0]:
                summed = [sum(of.layers[block][kind] for block in blocks) for kind in MEMORY_KINDS]
                table.add_row(plural(len(blocks), "block"), *map(_mb, summed), _mb(sum(summed)))
            continue
        if any(kinds.values()):
            table.add_row(escape(shown(name)), *(_mb(kinds[kind]) for kind in MEMORY_KINDS), _mb(sum(kinds.values())))
    table.add_section()
    for name, nbytes in of.others.items():
        table.add_row(escape(shown(name)), *[""] * len(MEMORY_KINDS), _mb(nbytes))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds else ""


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
