"""The files of a run's folder, opened so that no file there can hurt the process that opens it.

The folder may be a stranger's, or in a place where others may write. So only regular files are opened: a pipe would never end, a link
may lead to anything. A reader says how much it takes at most. What is written anew gets a name that nobody else has made.

Standard library only, for a supervisor on hosts without packages.
"""

import errno
import json
import os
import re
import sys
import tomllib
import zlib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, BinaryIO


def load_alone(name: str) -> None:
    """Load the module `collectives.<name>`, which needs the standard library alone, without its package, which needs more.

    The package is not even looked for. Each import of the module, before or after, gives the same one.
    """
    full_name = f"collectives.{name}"
    if full_name not in sys.modules:
        spec = spec_from_file_location(full_name, Path(__file__).resolve().parents[1] / "collectives" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules.setdefault(full_name, module)  # another thread may have imported it


load_alone("files")
from collectives.files import OddFileError as OddFileError  # noqa: E402
from collectives.files import (  # noqa: E402
    open_new,
    read_regular,
)
from collectives.files import open_regular as open_regular  # noqa: E402
from collectives.files import partial_of as partial_of  # noqa: E402
from collectives.files import read_named as bytes_of_named  # noqa: E402

BLOCK_BYTES = 2 << 20
"""That are read at once: a short line takes ten times its length when it is decoded."""
MOST_LINE_BYTES = 8 << 20
"""Of a line. A step of 50,000 ranks has 7 MB in ranks.jsonl."""
MOST_LINES_BYTES = 64 << 30
"""Of a file of lines."""
MOST_TEXT_BYTES = 4 << 20
"""Of reports and marks."""
MOST_SETTINGS_BYTES = 32 << 20
"""Of settings, with a list of a hundred thousand shards."""
_MOST_WORK = 1 << 20
"""Of tomllib for a text: it takes about a microsecond for a character outside of strings, and less for one of a string, or a blank."""
_MOST_DEEP = 16
"""Parts of a name in TOML. The settings of a run have two."""
_MOST_RATIO, _FREE_BYTES, _MOST_UNPACKED_BYTES = 200, 8 << 20, 8 << 30
"""Of a packed file: traces pack to a fifteenth, and zeros to a thousandth."""


def reading(path: Path, *, most_bytes: int | None = None) -> BinaryIO:
    """The open file, unbuffered. OSError: see `open_regular`."""
    return open(open_regular(path, most_bytes=most_bytes), "rb", buffering=0)


def read(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """All bytes of a file. OSError: see `open_regular`."""
    return read_regular(path, most_bytes)


def read_text(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The text of a file, with characters in place of bytes that are no UTF-8. OSError: see `open_regular`."""
    return read(path, most_bytes=most_bytes).decode(errors="replace")


def read_beginning(path: Path) -> str:
    """The first MOST_TEXT_BYTES of a text: of reports, to which each rank of a large job may add one. OSError: see `open_regular`.

    Bytes that are no UTF-8 are shown as escapes.
    """
    with reading(path) as file:
        data = bytearray()
        while len(data) < MOST_TEXT_BYTES and (piece := file.read(MOST_TEXT_BYTES - len(data))):
            data += piece
    return data.decode(errors="backslashreplace")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. OSError: see `open_regular`; ValueError for something else."""
    found = json_of(read(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def read_named(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The text of a file of settings that the words of this process name, and who else could have written it.

    OSError: see `collectives.files.read_named`; ValueError if it is no UTF-8, or takes too much memory.
    """
    data, reason = bytes_of_named(path, MOST_SETTINGS_BYTES)
    return _text_of(data), reason


def no_code(name: str, path: str | os.PathLike[str], reason: str) -> str:
    """The error about a setting that is code, in a file that others could have written."""
    return (
        f"{name} in {os.fspath(path)}: it is code, and is taken only from a file that nobody else can write to, but {reason}; "
        f"give --{name.replace('_', '-')} on the command line, or make the file your own (cp, chmod go-w) in a folder of your own"
    )


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError, also for one that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML document in a file of settings. OSError: see `open_regular`; ValueError: see `toml_of_bytes`."""
    return toml_of_bytes(read(path, most_bytes=MOST_SETTINGS_BYTES))


def toml_of_bytes(data: bytes) -> dict[str, Any]:
    """The document of a TOML text in UTF-8. ValueError: see `toml_of`; also for one that takes too much memory."""
    return toml_of(_text_of(data))


def _text_of(data: bytes) -> str:
    width = 4 if re.search(rb"[\xf0-\xff]", data) else 2 if re.search(rb"[\xc4-\xff]", data) else 1
    if len(data) * width > MOST_SETTINGS_BYTES:  # one such character makes all of them so wide in memory
        raise ValueError(
            f"it has {len(data):,} bytes; expected at most {MOST_SETTINGS_BYTES // width:,} with such characters"
        )
    return data.decode()


def toml_of(text: str) -> dict[str, Any]:
    """The document of a TOML text. ValueError, also for one that takes Python more than seconds: deep names, or very many of them."""
    outside: list[str] = []
    written: list[str] = []
    work = text.count("\\")
    for part, quote in _parts(text) if work <= _MOST_WORK else ():
        if not quote:
            outside.append(part)
            num_blanks = part.count(" ")  # tomllib takes them fast
            work += len(part) - num_blanks + num_blanks // 16 + part.count(".")
        elif quote == '"' and written[-1] and _is_plain(part):
            part = f"'{part[1:-1]}'"  # the same string: tomllib looks at each character of one in the other quotes
            work += 1
        else:
            work += 1 + len(part) // 16
        if work > _MOST_WORK:
            break
        written.append(part)
    if work > _MOST_WORK:
        raise ValueError(
            f"it is too long: it has more than some {_MOST_WORK:,} characters outside of texts, or escapes"
        )
    if any(name.count(".") >= _MOST_DEEP for name in _NAME.findall("".join(outside))):
        raise ValueError(f"it is nested too deeply: it has a name of more than {_MOST_DEEP} parts")
    try:
        return tomllib.loads("".join(written))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_plain(string: str) -> bool:
    """Whether a string in double quotes is the same one in single quotes. Short ones may as well stay as they are."""
    return len(string) > 20 and string[-1] == '"' and not ("\\" in string or "'" in string)


_NAME = re.compile(r"[\w\-. \t]+")
_OPENING = re.compile(r"\"\"\"|'''|[\"'#]")
_ENDS = {
    '"': re.compile(r'"|\\.', re.DOTALL),
    '"""': re.compile(r'"{3,5}|\\.', re.DOTALL),  # one or two quotes before the end are of the string
    "'": re.compile("'"),
    "'''": re.compile("'{3,5}"),
    "#": re.compile("\n"),
}


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a TOML text in order: strings and remarks with what they begin with, and with "" what is between them."""
    at = 0
    while opening := _OPENING.search(text, at):
        begin, quote = opening.start(), opening[0]
        yield text[at:begin], ""
        found = _ENDS[quote].search(text, opening.end())
        while found and found[0][0] == "\\":
            found = _ENDS[quote].search(text, found.end())
        at = found.end() if found else len(text)
        yield text[begin:at], quote
    yield text[at:], ""


# Files of lines


def blocks_of_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file in blocks, and whether the block is a last line without its end. A file named .gz is unpacked.

    FileNotFoundError without one. OSError: see `open_regular`; also for a line or a file that is too long, and for damage of what is
    packed.
    """
    with reading(path, most_bytes=MOST_LINES_BYTES) as file:
        rest = b""
        for block in _unpacked(path, file) if path.suffix == ".gz" else iter(lambda: file.read(BLOCK_BYTES), b""):
            whole, newline, torn = block.rpartition(b"\n")
            if newline:
                yield rest + whole, False
                rest = torn
            else:
                rest += block
            if len(rest) > MOST_LINE_BYTES:
                raise too_long(path)
        if rest:
            yield rest, True


def too_long(path: Path) -> OSError:
    """The error of a line that is too long."""
    return OddFileError(
        errno.EFBIG, f"it has a line of more than {MOST_LINE_BYTES:,} bytes, so it is damaged", str(path)
    )


def _unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The contents of a gzip file, piece by piece."""
    num_read, num_bytes, member = 0, 0, zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        while True:
            piece = member.unconsumed_tail or member.unused_data
            if not piece:
                piece = file.read(1 << 16)
                num_read += len(piece)
            most = min(_MOST_RATIO * num_read + _FREE_BYTES, _MOST_UNPACKED_BYTES)
            if piece and member.eof:
                member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            unpacked = member.decompress(piece, BLOCK_BYTES)
            if not piece and not unpacked:
                break
            num_bytes += len(unpacked)
            if num_bytes > most:
                raise OddFileError(
                    errno.EFBIG, f"it unpacks to too much: more than {most:,} bytes of {num_read:,}", str(path)
                )
            yield unpacked
    except zlib.error as error:
        raise OddFileError(errno.EINVAL, f"it is damaged, or no gzip file: {error}", str(path)) from None
    if not member.eof:
        raise OddFileError(errno.EINVAL, "it is cut off, or no gzip file", str(path))


# Writing


def adding(path: Path, mode: int = 0o666) -> BinaryIO:
    """The file, unbuffered, to add to its end; it is made if need be. `mode`: of a new one. OSError: see `open_regular`."""
    return open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "ab", buffering=0)


def making(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file of that name, unbuffered. FileExistsError if there is anything, also a link to nothing."""
    return open(open_new(path, mode), "w+b", buffering=0)


def make_folder(path: Path) -> None:
    """Make a folder in that of a run, if there is none. OddFileError if there is a link in its place, OSError if it cannot be made.

    What a run writes stays in its folder. Its user may move that, or its checkpoints, by a link: others may not choose another place.
    """
    check_own(path)
    path.mkdir(parents=True, exist_ok=True)


def check_own(path: Path) -> None:
    """OddFileError if there is a link in the place of a folder of a run."""
    if path.is_symlink():
        raise OddFileError(errno.ELOOP, "it is a link; expected a folder, or none", str(path))


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file, so that a reader finds the old one or the new one. `mode`: of the new one, less the umask. OSError."""
    partial = partial_of(path)
    try:
        with making(partial, mode) as file:
            write_all(file, data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
