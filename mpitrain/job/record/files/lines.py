"""Files of JSON lines in order of step, such as `metrics.jsonl`: they grow by a line each step, and are cut where a run goes on."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mpitrain.files import MOST_LINE_BYTES, MOST_LINES_BYTES, adding, reading

_Step = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Line(msgspec.Struct):
    step: _Step


class _Evaluation(msgspec.Struct):
    step: _Step
    heldout_loss: float | msgspec.UnsetType | None = msgspec.UNSET


_step_of = msgspec.json.Decoder(_Line).decode
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_evaluation_of = msgspec.json.Decoder(_Evaluation).decode


class LinesFile:
    """A file of one JSON object per line, each with a `step`."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        """Open the file to continue after `steps_done` steps: lines of later steps, from before a crash, are cut off."""
        self._path = path
        self._file = adding(path)
        self._unwritten = b""
        self._failure: OSError | None = None
        kept, is_cut, cut = 0, False, set()
        for line, step in _lines(path):
            is_cut = is_cut or step > steps_done
            if is_cut:
                cut.add(step)
            else:
                kept += len(line)
        self.num_cut = len([step for step in cut if step > steps_done])
        """The number of steps whose lines are cut off."""
        # In place: if a kill interrupted the rewriting of the whole file, its lines would be lost.
        self._file.truncate(kept)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add a line, with null for values that are not finite; readers see it at once. A line that cannot be written (full disk) is
        written with the next one; see `check`."""
        self._unwritten += msgspec.json.encode(entry) + b"\n"
        self._failure = None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            # Not raised here: only rank 0 would notice the error, and the steps since the last checkpoint would be lost.
            self._failure = error

    @property
    def problem(self) -> str:
        """Why the last lines could not be written; "" if they were."""
        if self._failure is None:
            return ""
        return f"{self._path} cannot be written: {self._failure.strerror or self._failure}"

    def check(self) -> None:
        """Raise OSError if lines could not be written."""
        if self._failure is not None:
            raise OSError(self.problem)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_evaluated(path: Path, step: int) -> bool:
    """Whether the `metrics.jsonl` at `path` has the evaluation after `step` steps."""
    return any(_has_evaluation(line) for line, its in _lines(path) if its == step)


def _has_evaluation(line: bytes) -> bool:
    try:
        return _evaluation_of(line).heldout_loss is not msgspec.UNSET
    except _ERRORS:
        return False


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """The lines and their steps, up to the first that is incomplete or damaged: a killed process may have left one."""
    try:
        file = io.BufferedReader(reading(path, most_bytes=MOST_LINES_BYTES), 1 << 20)  # type: ignore[type-var]
    except FileNotFoundError:
        return
    with file:
        while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
            try:
                yield line, _step_of(line).step
            except _ERRORS:
                return
