"""Tables of one or several launches. Neither torch nor MPI."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from collectives.bench.kit.launches import alike
from collectives.shared.tables import new_table, plural
from mpitrain.tools.plan.comparing.results import (
    APART,
    ComparisonLaunch,
    LayoutRow,
    excess_of_best,
    in_order,
    median_error,
    merged,
)


def tables(launches: Sequence[ComparisonLaunch]) -> Iterator[RenderableType]:
    """The output for launches; launches of one kind share a table."""
    for group in alike(launches):
        first, rows = group[0], merged(group)
        yield Text(f"{first.size}, {first.ranks_on_nodes}, {plural(first.threads, 'thread')} each", style="bold")
        title = f"medians of {len(group)} launches" if len(group) > 1 else f"medians of {first.steps} steps"
        table = new_table(["layout", "predicted ms", "measured ms", "fastest ms", "predicted / measured"], title=title)
        for row in sorted(rows, key=lambda row: row.measured_s):
            seconds = (row.predicted_s, row.measured_s, row.fastest_s)
            table.add_row(row.name, *(f"{value * 1e3:,.0f}" for value in seconds), f"{row.ratio:.2f}")
        yield table
        yield Text(summary(rows))
        if len(group) > 1:
            yield from (
                Text(f"  launch {at}: {summary(one.rows)}; load {one.load:.1f}") for at, one in enumerate(group, 1)
            )


def summary(rows: Sequence[LayoutRow]) -> str:
    """How good the predictions are, in one line."""
    right, count = in_order(rows)
    share = f"{right / count:.0%}" if count else "none"
    return (
        f"median error {median_error(rows):.1%}; {share} of {plural(count, 'pair')} more than {APART:.0%} apart in order; the layout "
        f"predicted as best takes {excess_of_best(rows):.1%} more than the best"
    )
