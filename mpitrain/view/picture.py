"""Pictures (SVG) of what a command shows in a terminal."""

import argparse
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

WIDTH = 100
"""Characters of a line, unless a command needs more."""


def svg_file(word: str) -> Path:
    """The type of an option that names a picture. ArgumentTypeError for a name of another format."""
    if not word.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .svg, got {word}")
    return Path(word)


@contextmanager
def writing(option: str, path: Path, *, is_folder: bool = False) -> Iterator[None]:
    """Each OSError of the block, which writes the file or into the folder `path`, names the option and the path."""
    try:
        if path.exists() and path.is_dir() != is_folder:
            kinds = ("a file", "a folder")
            raise OSError(f"{option}: {path} is {kinds[not is_folder]}; expected {kinds[is_folder]}")
        yield
    except FileExistsError as error:  # a folder of the path is none
        raise OSError(f"{option}: {error.filename} is a file; expected a folder") from None
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{option}: {path} cannot be written: {error.strerror or error}") from None


def recorder(width: int) -> Console:
    """A console that prints nothing, and keeps what it is given for `write_svg`."""
    # With a height rich keeps the width also where TERM is dumb
    return Console(highlight=False, width=width, height=25, record=True, force_terminal=True, file=io.StringIO())


def write_svg(shown: Console, file: Path, *, title: str) -> None:
    """Write what a `recorder` was given. OSError if the file cannot be written.

    The picture needs no network: the fonts of the viewer take the place of those that rich lets it fetch.
    """
    text = re.sub(r"@font-face \{.*?\}\s*", "", shown.export_svg(title=title), flags=re.DOTALL)
    with writing("--svg", file):
        file.write_text(text, encoding="utf-8")
