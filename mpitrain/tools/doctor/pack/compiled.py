"""The compiled code of a module, as Python takes it without a look at the source."""

import importlib.util
import marshal
import warnings
from pathlib import Path

_UNCHECKED_HASH = 1
"""The flags of a .pyc that belongs to a hash of the source, which Python does not check."""


def compiled_name(name: str) -> str:
    """The name of the compiled file that belongs to a source."""
    return importlib.util.cache_from_source(name)


def compiled(path: Path, source: bytes) -> bytes | None:
    """The compiled file. None: the source is no Python of this version, as templates and tests may be."""
    code = _kept(path) or _compile(path, source)
    if code is None:
        return None
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)
    return head + code


def _kept(path: Path) -> bytes | None:
    """The code that the environment has already, if it belongs to this very source."""
    try:
        data = Path(compiled_name(str(path))).read_bytes()
        status = path.stat()
    except OSError:
        return None
    stamp = (int(status.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + (status.st_size & 0xFFFFFFFF).to_bytes(
        4, "little"
    )
    return data[16:] if data[:16] == importlib.util.MAGIC_NUMBER + bytes(4) + stamp else None


def _compile(path: Path, source: bytes) -> bytes | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return marshal.dumps(compile(source, str(path), "exec", dont_inherit=True))
    except (SyntaxError, ValueError, RecursionError):
        return None
