"""Compiles codec.c once for each user and version of the source, loads it, and calls it.

The compiled file is kept in the user's cache. A folder or file that another user can write to or replace is refused, because its code
would run here. A file gets its name after its code has given the right bits. The first file is never replaced, because on a network
file system the ranks of other nodes read it while they run; of ranks that compile at once, the later ones drop theirs.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collectives.codec import fallback
from collectives.codec.formats import BLOCK, FORMATS, Codec, Format
from collectives.environment import cache_folder
from collectives.files import other_writer
from collectives.launcher import environment_of_program

LEVELS = ("c", "avx2", "avx512")  # as in codec.c
_FORMATS = {"bf16": 0, "fp16": 1, "int8": 2, "fp8": 3}
_ENCODE, _DECODE, _DECODE_ADD = range(3)

_SOURCES = [Path(__file__).with_name(name) for name in ("codec.c", "vector_kernels.h", "avx2.h", "avx512.h")]
# A multiplication and an addition must round twice, as in NumPy: no contraction.
_FLAGS = ("-O3", "-fno-fast-math", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared")
COMPILE_S = 60.0


class Unavailable(Exception):  # noqa: N818  (not an error: NumPy does the work)
    """There is no native code here; the text is the reason."""


@dataclass(frozen=True)
class Native:
    """The codec at one level of the compiled library."""

    library: ctypes.CDLL
    level: int

    def encode(self, fmt: Format, x: np.ndarray, data: np.ndarray) -> None:
        if fmt.is_exact:
            fallback.encode(fmt, x, data)
        else:
            self._run(_ENCODE, fmt, x, data)

    def decode(self, fmt: Format, data: np.ndarray, x: np.ndarray) -> None:
        if fmt.is_exact:
            fallback.decode(fmt, data, x)
        else:
            self._run(_DECODE, fmt, x, data)

    def decode_add(self, fmt: Format, data: np.ndarray, total: np.ndarray) -> None:
        if fmt.is_exact:
            fallback.decode_add(fmt, data, total)
        else:
            self._run(_DECODE_ADD, fmt, total, data)

    def _run(self, action: int, fmt: Format, x: np.ndarray, data: np.ndarray) -> None:
        # ctypes releases the GIL for the time of the call
        self.library.codec_run(self.level, action, _FORMATS[fmt.name], x.ctypes.data, data.ctypes.data, x.size)


def load(compile_s: float = COMPILE_S) -> list[Native]:
    """The codec at each level that this CPU runs and that gives NumPy's bits, the best one last; at least one.

    `compile_s`: the most seconds of a compiler, 0: none is started. Unavailable: no compiler, no place, or other bits at all levels.
    """
    sources = [path.read_bytes() for path in _SOURCES]
    system = (_FLAGS, os.environ.get("CC"), platform.machine(), platform.libc_ver()[0])
    key = hashlib.sha256(repr((sources, system)).encode()).hexdigest()[:16]
    reasons = []
    for folder in (cache_folder() / "codec", Path(tempfile.gettempdir(), f"mpitrain-codec-{os.geteuid()}")):
        path = folder / f"codec-{key}.so"
        try:
            path = _make_own(folder) / path.name
            if not path.exists():
                return _compiled(path, compile_s)
            _refuse_others(path, stat.S_ISREG)
            return _levels(str(path))
        except (OSError, AttributeError) as error:
            reasons.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    raise Unavailable("; ".join(reasons))


def _make_own(folder: Path) -> Path:
    """Make the folder if there is none; returns its path without links. PermissionError if another user can write to or replace it."""
    for parent in reversed(folder.parents):
        parent.mkdir(mode=0o755, exist_ok=True)  # the umask may let a group write
    folder.mkdir(mode=0o700, exist_ok=True)
    _refuse_others(folder, stat.S_ISDIR)
    found = folder.resolve(strict=True)
    _refuse_others(found, stat.S_ISDIR)
    if reason := other_writer(found):
        raise PermissionError(reason)
    return found


def _refuse_others(path: Path, is_kind: Callable[[int], bool]) -> None:
    """PermissionError if another user can write to the file or folder, or if it is something else, such as a link."""
    status = path.lstat()
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"another user can write to this {'folder' if is_kind is stat.S_ISDIR else 'file'}")


def _levels(path: str) -> list[Native]:
    """The codec in a compiled file, at each level with the right bits. Unavailable if no level has them.

    OSError or AttributeError if the file is no library of this codec.
    """
    library = ctypes.CDLL(path)
    library.codec_level.argtypes = ()
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.codec_run.argtypes = (number, number, number, pointer, pointer, ctypes.c_size_t)
    library.codec_run.restype = None
    found = [Native(library, level) for level in range(library.codec_level() + 1)]
    wrong = {each.level: fmt for each in found if (fmt := _other_bits(each))}
    if len(wrong) == len(found):
        raise Unavailable(f"the compiled code has other bits in {', '.join(dict.fromkeys(wrong.values()))}")
    return [each for each in found if each.level not in wrong]


def _compiled(path: Path, compile_s: float) -> list[Native]:
    """Compile the codec to `path`, and load it. Errors as of `_levels`; Unavailable if it cannot be compiled."""
    if compile_s == 0:
        raise Unavailable("no rank of this node has compiled it")
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(fd)  # compilers write to a new file of this name
    try:
        command = [*_compiler(), *_FLAGS, str(_SOURCES[0]), "-o", temporary]
        done = subprocess.run(
            command, env=environment_of_program(), capture_output=True, text=True, errors="replace", timeout=compile_s
        )
        if done.returncode != 0:
            error = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise Unavailable(f"{command[0]} cannot compile it: {error}")
        levels = _levels(temporary)
        with open(temporary, "rb") as file:
            os.fchmod(file.fileno(), 0o700)  # the umask may let a group write
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:  # another rank was first
            pass
        except OSError:  # a file system without links
            os.replace(temporary, path)
        return levels
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} takes longer than {compile_s:g} s") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def _compiler() -> list[str]:
    said = os.environ.get("CC")
    try:
        for name in [said] if said else ["cc", "gcc", "clang"]:
            words = shlex.split(name)
            if words and shutil.which(words[0]):
                return words
    except ValueError as error:
        raise Unavailable(f"CC is {said!r}: {error}") from None
    raise Unavailable(f"no C compiler: {said or 'cc, gcc and clang'} not found")


def _other_bits(native: Native) -> str | None:
    """A format whose bits differ from NumPy's on a few blocks: some compilers are inexact by default."""
    for x in _samples():
        for fmt in FORMATS.values():
            encoded = [np.zeros(fmt.nbytes(x.size), np.uint8) for _ in range(2)]
            decoded, total = (np.ones((2, x.size), np.float32) for _ in range(2))
            both: tuple[Codec, Codec] = (native, fallback)
            for codec, data, out, add in zip(both, encoded, decoded, total, strict=True):
                codec.encode(fmt, x, data)
                codec.decode(fmt, data, out)
                codec.decode_add(fmt, data, add)
            if not all(np.array_equal(*pair) for pair in (encoded, decoded.view(np.uint32), total.view(np.uint32))):
                return fmt.name
    return None


def _samples() -> Iterator[np.ndarray]:
    steps = np.arange(-BLOCK, BLOCK + 1, dtype=np.float32) / 2  # ties of all formats are among them
    yield steps * np.float32(127 / 128)
    yield steps / 64 * np.float32(448 / 2) + np.float32(2.0**-7)
    yield np.float32(2.0) ** np.linspace(-149, 127, 2 * BLOCK + 3, dtype=np.float32)
    yield np.array([1, -0.0, np.inf, np.nan, -np.inf, 3e38, 1e-45], np.float32)
    yield np.array([0x7FFFFFFF, 0xFF812345], np.uint32).view(np.float32)  # NaNs that rounding would turn into numbers
