"""The comparison with published runs: tables for a terminal and for docs/measured.md, and the plot."""

from statistics import mean

from benchmarks.published.tables import CHOICES, TABLES, Compared, Table, choose, compare
from collectives.shared.pictures import new_figure

COLOURS = ("#4c78a8", "#72b7b2", "#e45756", "#f2a541", "#54a24b", "#b279a2")


def markdown() -> str:
    """All rows of all tables, and the choices between layouts."""
    compared = [(table, compare(table)) for table in TABLES]
    lines = ["| table | machine | rows | mean error | worst error |", "| --- | --- | --- | --- | --- |"]
    for table, rows in compared:
        errors = [abs(row.error) for row in rows]
        lines.append(f"| {table.name} | {table.machine} | {len(rows)} | {mean(errors):.1%} | {max(errors):.1%} |")
    lines += [
        "",
        "| figure | fastest in the paper | predicted fastest | the paper's layout takes |",
        "| --- | --- | --- | --- |",
    ]
    for choice in CHOICES:
        chosen = choose(choice)
        more = f"{chosen.excess:.1%} more" if chosen.excess else "the same"
        lines.append(f"| {choice.name} | {choice.best} | {chosen.best} | {more} |")
    lines += ["", "| table | row | published | predicted | error |", "| --- | --- | --- | --- | --- |"]
    for table, rows in compared:
        for row in rows:
            lines.append(
                f"| {table.name} | {row.row.name} | {_value(table, row.row.value)} | {_value(table, row.predicted)} "
                f"| {row.error:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def _value(table: Table, value: float) -> str:
    digits = 2 if table.unit == "s" else 1 if table.unit == "days" else 0
    return f"{value:.{digits}f} {table.unit}"


def plot(path: str) -> None:
    """Write a picture of predicted over published values to `path` as SVG. OSError; UsageError without matplotlib."""
    figure = new_figure(7, 5)
    axes = figure.add_subplot()
    for table, colour in zip(TABLES, COLOURS, strict=True):
        rows: list[Compared] = compare(table)
        published = [row.row.value for row in rows]
        ratios = [row.predicted / row.row.value for row in rows]
        axes.plot(published, ratios, "o", color=colour, label=f"{table.name} ({table.unit})")
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.axhspan(0.95, 1.05, color="#888888", alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_ylim(0.8, 1.2)
    axes.set_xlabel("published value, in the unit of its table")
    axes.set_ylabel("predicted / published")
    axes.legend(fontsize="small", frameon=False, loc="upper left", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "mpitrain"}):  # the same file each time
        figure.savefig(path, format="svg", metadata={"Date": None})
