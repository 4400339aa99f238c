"""What a fuzz target says of itself: how a sound input is made, mutated, wrapped and read.

An input has *parts* before it is wrapped, and *files* after: a part may be JSON-like, and the target's `wrap` turns the parts into the
bytes of files, with the checksums, lengths and compression that fit the mutated content. So a mutation comes past the outer check.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from collectives.texts import shown
from fuzzing.mutation import mutate_bytes, mutate_value

Special = Callable[[Path], object]
"""Makes something else than a plain file at a path: a pipe, a link, a sparse file."""
Parts = dict[str, Any]
"""Bytes, lists and dicts as of JSON, or `Special`, by names."""
Files = dict[str, bytes | Special]
"""The files of an input by their paths in its folder, such as "step-1/manifest.jsonl"."""


class Sound(NamedTuple):
    """A sound input. `documents`: what `read` is to return; None: that is not compared."""

    parts: Parts
    documents: object = None


class RefusedError(Exception):
    """A target's `read` raises it with the line by which a command refused the input."""


class Target:
    """A reader of files from elsewhere. A subclass gives `make` and `read`, and what differs of the rest."""

    errors: tuple[type[Exception], ...] = (ValueError, OSError)
    """The errors by which the reader may refuse an input. Each is raised by a `raise` of the project, or is an OSError that names a
    file, and its message is one line."""
    limit_s = 10.0
    """For one input, on a busy machine."""
    share_damaged = 0.2
    """Of the inputs: after the wrapping a file of them is damaged, which the outer check may find."""
    share_sound = 0.0
    """Of the inputs: they stay as they are made, and what is read of them is compared."""

    def make(self, rng: Random) -> Parts:
        """A sound input, one of several kinds. `mutate` may change what it returns."""
        return self.sound(rng).parts

    def sound(self, rng: Random) -> Sound:
        """As `make`, with what it is made from. A subclass gives one of them."""
        return Sound(self.make(rng))

    def read(self, folder: Path) -> object:
        """Do all that the project does with such an input in `folder`. New files go to `folder.with_name("output")`, which is missing.

        Raises `errors` or `RefusedError` for an input that is refused. Any other error, also one of `assert`, is a fault.
        """
        raise NotImplementedError

    def passes(self, files: Files) -> bool:
        """Whether the input would pass the outer check: magic number, checksum, compression."""
        raise NotImplementedError

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        """Change one thing in one part."""
        name = rng.choice([name for name, part in parts.items() if not callable(part)])
        if isinstance(parts[name], bytes):
            return {**parts, name: mutate_bytes(rng, parts[name])}
        holder = [parts[name]]
        mutate_value(rng, holder)
        return {**parts, name: holder[0] if holder else None}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        """The files of these parts. All checksums and lengths fit."""
        return parts

    def missing(self) -> str | None:
        """The reason why this installation cannot run the target, or None."""
        return None


def fuzzed(target: Target, rng: Random) -> Files:
    """A mutated input. The same state of `rng` gives the same input."""
    parts = target.make(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        parts = target.mutate(rng, parts)
    files = dict(target.wrap(rng, parts))
    if rng.random() < target.share_damaged:
        name = rng.choice([name for name, content in files.items() if isinstance(content, bytes)])
        content = files[name]
        assert isinstance(content, bytes)
        files[name] = mutate_bytes(rng, content)
    return files


def write_files(files: Files, folder: Path) -> None:
    """Make the files of an input in an empty folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)


def command(main: Callable[[list[str]], int | None], words: Sequence[object]) -> str:
    """What `main(words)` prints, as if from a terminal. Raises `RefusedError` with the line that it prints on stderr if it fails.

    AssertionError for a traceback, for several lines of an error, and for characters that control a terminal.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(word) for word in words]) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                err.write(end.code + "\n")
    printed, complaint = out.getvalue(), err.getvalue()
    assert "Traceback (most" not in complaint, complaint[-2000:]
    odd = [line for line in (printed + "\n" + complaint).splitlines() if shown(line, lines=True) != line]
    assert not odd, f"control characters: {odd[0]!r:.300}"
    if code:
        lines = complaint.strip().splitlines()
        assert len(lines) == 1, f"exit code {code} with {len(lines)} lines: {complaint[-2000:]!r}"
        raise RefusedError(lines[0])
    return printed
