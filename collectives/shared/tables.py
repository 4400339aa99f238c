"""Tables for a terminal and for Markdown, and numbers with nouns."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def new_table(headings: Sequence[str], *, title: str | None = None, left: int = 1, caption: str | None = None) -> Table:
    """A table without rows. The first `left` columns are aligned to the left, the others to the right."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as lines of Markdown."""
    lines = [headings, ("---", *["---:"] * (len(headings) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plural(count: int, noun: str) -> str:
    """A number with its noun, such as '1 launch' or '2 launches'."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
