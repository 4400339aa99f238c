"""The rows that a run in Weights & Biases has, in a file: offline, W&B does not tell a later start."""

import errno
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain.files import OddFileError, adding, blocks_of_lines, replace, write_all

_MOST_ROWS = 1_000_000
"""Of steps that are computed again."""
_MOST_NUMBER = 1 << 53


class _Row(NamedTuple):
    step: int
    words: str  # the step and its losses, as JSON
    number: int  # W&B's own, which only grows


_NO_ROW = _Row(0, "", -1)


class WandbRows:
    """The file `path`, with a line [STEP, LOSS, HELDOUT_LOSS, NUMBER] for each row of steps after `steps_done`, and for the last row.

    Lines without a number, of an older release, are of rows that follow each other. OSError if the file is none that a run has written.
    """

    def __init__(self, path: Path, steps_done: int) -> None:
        last, later = _NO_ROW, list[_Row]()
        with suppress(FileNotFoundError):
            last, later = _read(path, steps_done)
        self.next_number = last.number + 1
        """The number of the next row."""
        self._earlier = {row.words for row in later}
        kept = sorted({*later, *([last] if last.step else [])})
        replace(path, "".join(map(_line, kept)).encode())  # as one, so that a kill leaves the numbers
        self._file = adding(path)

    def has(self, step: int, figures: dict[str, float]) -> bool:
        """Whether an earlier start has added a row of this step with these losses."""
        return _words(step, figures) in self._earlier

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write down that W&B has got this row, with the next number."""
        write_all(self._file, _line(_Row(step, _words(step, figures), self.next_number)).encode())
        self.next_number += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _words(step: int, figures: dict[str, float]) -> str:
    return json.dumps([step, figures.get("loss"), figures.get("heldout_loss")])


def _line(row: _Row) -> str:
    return f"{row.words[:-1]}, {row.number}]\n"


def _read(path: Path, steps_done: int) -> tuple[_Row, list[_Row]]:
    """The row with the greatest number, and the rows of steps after `steps_done`."""
    last, later, number = _NO_ROW, list[_Row](), -1
    for block, _ in blocks_of_lines(path):
        for line in block.decode(errors="replace").splitlines():
            if (row := _row(line, number + 1)) is None:
                continue
            number = row.number
            last = max(last, row, key=lambda each: each.number)
            if row.step > steps_done:
                later.append(row)
        if len(later) > _MOST_ROWS:
            raise OddFileError(
                errno.EFBIG, f"it has more than {_MOST_ROWS:,} rows after step {steps_done:,}", str(path)
            )
    return last, later


def _row(line: str, following: int) -> _Row | None:
    """The row of a line; None if a kill has cut it. `following`: its number if it has none."""
    try:
        step, *losses = json.loads(line)
        number = losses.pop() if len(losses) == 3 else following
        is_row = len(losses) == 2 and all(each is None or isinstance(each, float | int) for each in losses)
    except (ValueError, TypeError, RecursionError):
        return None
    if not is_row or type(step) is not int or step < 1 or type(number) is not int or not 0 <= number <= _MOST_NUMBER:
        return None
    return _Row(step, json.dumps([step, *losses]), number)
