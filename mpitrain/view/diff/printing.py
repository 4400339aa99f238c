"""What the command prints."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from ckpt.check.comparing import TensorDifference
from ckpt.commands.diff import meta_line, tensor_table
from ckpt.commands.terminal import index_text, new_table
from collectives.shared.terminal import console
from collectives.texts import shown
from mpitrain.job.record.conditions import Condition
from mpitrain.job.record.parsing.words import counted
from mpitrain.view.diff.checkpoints import CheckpointDifference
from mpitrain.view.diff.metrics import MetricDifference, MetricsDifference, ranges_in_words

MOST = 20
"""Rows of a table; --json has all."""
_LEAST_WIDTH = 120  # a narrow terminal folds lines, but all digits are there
_VALUE_WIDTH = 40  # characters of a setting


def reporter(*, quiet: bool) -> Console:
    """The console for a report. quiet: it prints nothing."""
    out = Console(quiet=True) if quiet else console()
    out.width = max(out.width, _LEAST_WIDTH)
    return out


_MOST_CONDITIONS = 300
"""Rows of the table of settings; a run has half as many."""


def say(out: Console, *lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        out.print(Text(shown(line)), soft_wrap=True)


def print_conditions(out: Console, conditions: Sequence[Condition]) -> None:
    """A table of the conditions that differ."""
    if not conditions:
        say(out, "settings and hardware: no difference is known")
        return
    table = new_table("SETTING", "A", "B", "EFFECT")
    for name, a, b, effect in conditions[:_MOST_CONDITIONS]:
        table.add_row(Text(shown(name)), Text(_value(a)), Text(_value(b)), effect)
    out.print(table)
    if len(conditions) > _MOST_CONDITIONS:
        say(out, f"{len(conditions) - _MOST_CONDITIONS:,} more settings differ")


def print_algorithms(out: Console, conditions: Sequence[Condition]) -> None:
    """A condition of runs that only their checkpoints tell."""
    for each in conditions:
        if each.name == "algorithms":
            say(out, f"the runs take the algorithms of collectives from different tables: {each.effect}")


def print_metrics(out: Console, found: MetricsDifference) -> None:
    """The steps, the metrics that were compared, and a table of those that differ."""
    for side, steps in (("A", found.only_a), ("B", found.only_b)):
        if steps:
            say(out, f"only {side} has {counted(len(steps), 'step')}: {ranges_in_words(steps)}")
    if found.one_sided:
        say(out, f"only one run has, not compared: {_names(found.one_sided)}")
    same: dict[int, list[str]] = {}
    for each in found.metrics:
        if not each.num_differing:
            same.setdefault(each.num_steps, []).append(each.name)
    if same:
        parts = [f"{_names(names)} in {counted(num, 'step')}" for num, names in same.items()]
        say(out, f"the same bits: {'; '.join(parts)}")
    if not found.differing:
        return
    table = new_table("METRIC", "DIFFERING>", "OF>", "FIRST STEP>", "A>", "B>", "MAX ABS>", "MAX REL>")
    for each in found.differing[:MOST]:
        table.add_row(
            Text(shown(each.name)), str(each.num_differing), str(each.num_steps), str(each.first), _number(each.a), _number(each.b),
            f"{each.max_abs:.4g}", f"{each.max_rel:.4g}",
        )  # fmt: skip
    out.print(table)
    _say_more(out, len(found.differing))


def print_checkpoint(out: Console, found: CheckpointDifference) -> None:
    """What differs in two checkpoints."""
    num, total = len(found.tensors), counted(found.num_compared, "tensor")
    left_out = f"; not compared: {found.left_out}" if found.left_out else ""
    if not found:
        say(out, f"{found.name}: the same bits in {total}{left_out}")
        return
    say(out, f"{found.name}: {num} of {total} differ{left_out}")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            say(out, f"only in {side}: {_names(names)}")
    for each in found.meta[:MOST]:
        say(out, meta_line(each))
    _say_more(out, len(found.meta))
    if found.tensors:
        out.print(tensor_table(found.tensors[:MOST]))
        _say_more(out, len(found.tensors))


def verdicts(of_steps: MetricsDifference, of_checkpoints: Iterable[CheckpointDifference]) -> list[str]:
    """Lines with the first step and the first tensor that differ; none for the same bits."""
    return list(filter(None, [verdict_of_metrics(of_steps), *map(verdict_of_checkpoint, of_checkpoints)]))


def verdict_of_metrics(found: MetricsDifference) -> str:
    """The first step that differs, and by how much; empty if none does."""
    if not found.differing:
        return ""
    step = found.differing[0].first
    told = [_difference(each) for each in found.differing if each.first == step]
    return f"first step that differs: {step:,}, in {', '.join(told[:4])}" + f" and {len(told) - 4} more" * (
        len(told) > 4
    )


def verdict_of_checkpoint(found: CheckpointDifference) -> str:
    """The first tensor that differs, and by how much; empty if nothing does."""
    if not found:
        return ""
    begin = f"first difference of checkpoints: {found.name}, "
    if found.tensors:
        return begin + _tensor(found.tensors[0])
    if found.only_a or found.only_b:
        return begin + f"{shown([*found.only_a, *found.only_b][0])} is in one of them alone"
    return begin + meta_line(found.meta[0])


def _difference(each: MetricDifference) -> str:
    relative = each.relative
    how_much = "" if math.isnan(relative) else f" ({relative:.2g} relative)"
    return f"{each.name} {_number(each.a)} and {_number(each.b)}{how_much}"


def _tensor(each: TensorDifference) -> str:
    if each.num_differing is None:
        return f"{shown(each.name)} has another shape"
    if each.first is None:
        return f"{shown(each.name)} has another dtype"
    first = f", the first at {index_text(each.first)}" if each.first else ""
    by = f"at most {each.max_abs:.2g} ({each.max_rel:.2g} relative)"
    return f"{shown(each.name)}: {each.num_differing:,} of {counted(each.size, 'element')} differ{first}, by {by}"


def _say_more(out: Console, count: int) -> None:
    if count > MOST:
        say(out, f"... and {count - MOST:,} more (--json prints all)")


def _names(names: Iterable[str], most: int = 12) -> str:
    names = list(map(shown, names))
    return ", ".join(names[:most]) + f" and {len(names) - most:,} more" * (len(names) > most)


def _number(value: float) -> str:
    """All digits, because the last ones may be what differs."""
    return "none" if math.isnan(value) else repr(value)


def _value(text: str) -> str:
    short = text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 4]} ..."
    return shown(short) if short else "-"
