"""Shards that are not files on this machine, or are compressed: each comes once to each node, into a folder with a limit.

The ranks of a node share the folder. A rank that needs a shard locks its name (flock), and fetches it if no other rank has; the others
wait for the lock, and then map the same file. A shard that was not used for the longest time makes room for the next one. A rank that
has a file mapped keeps its bytes.

    FOLDER/mpitrain-shards-UID/HASH     a whole shard, unpacked. The hash is of the path or URL (without signatures, which
                               are made anew, if its version is of the contents), size, version or times, checksum
                               HASH.lock        its lock
                               HASH.part        while it is fetched; HASH.unpacked while it is unpacked
                               HASH.failed      why the last attempt has failed, for the ranks that waited for it
"""

import errno
import fcntl
import gzip
import hashlib
import os
import random
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import ckpt
from ckpt.storage.file_info import is_of_contents
from collectives.addresses import identity_of
from collectives.files import open_regular
from collectives.texts import without_secrets
from mpitrain.job.data.checksums import difference
from mpitrain.job.data.documents import DamagedShardError, ending_of, is_compressed

_PIECE_BYTES = 1 << 20
_ZST_PIECE_BYTES = 4 << 10  # so that what a piece unpacks to fits into memory
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_NO_REMEDY = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def needs_copy(shard: str) -> bool:
    """Whether a shard, a path or URL, must be fetched or unpacked before it can be read."""
    return "://" in shard or is_compressed(shard)


def cache_folder(folder: str | Path | None) -> Path:
    """The folder of this user's shards in `folder`; None: in $TMPDIR, else /tmp."""
    return Path(folder or tempfile.gettempdir()) / f"mpitrain-shards-{os.getuid()}"


class ShardCache:
    """The shards of a run on this node.

    Args:
        folder: on a disk of this node, which need not exist; None: $TMPDIR, else /tmp.
        limit_bytes: what all shards in the folder may take.
        patience_s: how long to try again after an error of a server.
        checksums, versions: of some shards: see ShardList.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        limit_bytes: int = 64 << 30,
        patience_s: float = 120.0,
        checksums: Mapping[str, bytes] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = cache_folder(folder)
        self._limit_bytes, self._patience_s = limit_bytes, patience_s
        self._checksums, self._versions = checksums or {}, versions or {}
        self.num_fetched = 0
        """The shards that this process has fetched."""

    @contextmanager
    def local(self, shard: str, size: int) -> Iterator[Path]:
        """The path of a shard, a path or URL of `size` bytes, as an uncompressed file of this machine. It stays during the block.

        Raises:
            OSError: the shard cannot be fetched; the text names it.
            DamagedShardError: it has another size, version or checksum than listed, or cannot be unpacked.
        """
        if not needs_copy(shard):
            yield Path(shard)
            return
        _make_private(self._folder)
        checksum = self._checksums.get(shard, b"").hex()
        version = self._version(shard)
        # A signature that is made anew is of the same file, if a version says so. A token may also be what tells two files apart.
        file = identity_of(shard) if "://" in shard and is_of_contents(version, size) else shard
        name = f"{file}\0{size}\0{version}\0{checksum}".encode(errors="surrogateescape")
        path = self._folder / hashlib.blake2b(name, digest_size=16).hexdigest()
        failed, began = path.with_suffix(".failed"), time.time()
        with _locked(path.with_suffix(".lock")):
            if path.exists():
                os.utime(path)
            else:
                if why := _written_since(failed, began):  # while this rank waited: it would take as long again
                    kind, _, text = why.partition(" ")
                    raise (DamagedShardError if kind == DamagedShardError.__name__ else OSError)(text)
                try:
                    self._fetch(shard, size, path)
                except (OSError, DamagedShardError) as error:
                    with suppress(OSError):
                        failed.write_text(without_secrets(f"{type(error).__name__} {error}"))
                    raise
                failed.unlink(missing_ok=True)
                self.num_fetched += 1
            yield path

    def _version(self, shard: str) -> str:
        """A text that differs after a shard was replaced, also by one of the same size."""
        if "://" in shard:
            return self._versions.get(shard, "")
        its = os.stat(shard)
        return f"{its.st_mtime_ns} {its.st_ctime_ns}"  # programs that copy files set the first one to what it was

    def _fetch(self, shard: str, size: int, path: Path) -> None:
        part = path.with_suffix(".part")
        packed = part if "://" in shard else Path(shard)
        try:
            if "://" in shard:
                self._make_room(size, path)
                url, asks = ckpt.Url(shard), shard in self._versions
                for _ in range(2):  # another transfer may bring what the list says
                    version = _again(lambda: url.download(part, asks_version=asks), shard, self._patience_s)
                    if not (wrong := self._difference(shard, size, part) or self._replaced(shard, version)):
                        break
            else:
                wrong = self._difference(shard, size, packed)
            if wrong:
                raise DamagedShardError(f"{without_secrets(shard)}: {wrong}")
            if is_compressed(shard):
                self._unpack(shard, packed, path)
            else:
                part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _difference(self, shard: str, size: int, packed: Path) -> str:
        """What of a shard is not as listed; "" if all is."""
        found = packed.stat().st_size
        if found != size:
            return f"expected {size} bytes as listed, got {found}"
        return difference(packed, self._checksums[shard]) if shard in self._checksums else ""

    def _replaced(self, shard: str, version: str) -> str:
        """Whether a store has given other bytes than it has listed; "" if not, or if it says nothing of versions.

        OSError if it does not answer.
        """
        listed = self._versions.get(shard, "")
        if not listed or version in ("", listed) or _has_version(shard, listed, self._patience_s):
            return ""
        return f"it was replaced since the start: expected version {listed} as listed, got {version}; start again"

    def _unpack(self, shard: str, packed: Path, path: Path) -> None:
        """Write the contents of a compressed file. They may not be larger than the limit of the whole folder."""
        target, written = path.with_suffix(".unpacked"), 0
        try:
            with target.open("wb") as file:
                for piece in _unpacked(shard, packed):
                    written += len(piece)
                    if written > self._limit_bytes:
                        raise DamagedShardError(
                            f"{without_secrets(shard)}: it unpacks to more than {self._limit_bytes} bytes, the limit of all "
                            "shards on a node (data.cache_bytes)"
                        )
                    file.write(piece)
            self._make_room(written, path)
            target.rename(path)
        except DamagedShardError:
            raise
        except OSError as error:
            text = f"{without_secrets(shard)} cannot be unpacked into {self._folder}: {error.strerror}"
            raise OSError(error.errno, text) from None
        finally:
            target.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, path: Path) -> None:
        """Remove the shards that were not used for the longest time, as far as the limit asks for, and what killed ranks have left."""
        there = []
        for file in self._folder.iterdir():
            if re.fullmatch(r"[0-9a-f]{32}(\.part|\.unpacked)?", file.name) and file.stem != path.name:
                with suppress(OSError):
                    its = file.stat()
                    there.append((0.0 if file.suffix else its.st_mtime, its.st_size, file))
        used = sum(size for _, size, _ in there)
        for used_at, size, file in sorted(there):
            if used + num_bytes <= self._limit_bytes and used_at:
                return
            with suppress(OSError), _locked(file.with_suffix(".lock"), wait=False):  # not while another rank fetches it
                file.unlink()
                used -= size


def _has_version(shard: str, version: str, patience_s: float) -> bool:
    """Whether a store still gives this version of a file. Some give another one in a list than of the file alone.

    OSError if the store does not tell within `patience_s`.
    """
    url = ckpt.Url(shard)

    def in_list() -> str:
        try:
            its = url.parent.infos().get(url.name)
        except (FileNotFoundError, PermissionError):  # a web server need not list its folders
            return ""
        return its.version if its is not None else ""

    return _again(lambda: url.info().version, shard, patience_s) == version or (
        _again(in_list, shard, patience_s) == version
    )


def _make_private(folder: Path) -> None:
    """Make a folder for this user alone. OSError for one that is somebody else's, or a link: /tmp is open for all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    its = os.lstat(folder)
    if not stat.S_ISDIR(its.st_mode) or its.st_uid != os.getuid() or its.st_mode & 0o077:
        raise OSError(
            f"data.cache: {folder} is not a folder of this user alone; expected mode 0700, or choose another --data.cache"
        )


def _written_since(path: Path, began: float) -> str:
    """The text of a file that was written after a time; "" if there is none."""
    with suppress(OSError):
        if path.stat().st_mtime >= began:
            return path.read_text()
    return ""


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock of this node. BlockingIOError if another process has it, and `wait` is false."""
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def _unpacked(shard: str, packed: Path) -> Iterator[bytes]:
    """The contents of a compressed file, piece by piece. DamagedShardError if it is damaged or cut off."""
    try:
        yield from _of_zst(shard, packed) if ending_of(shard).lower().endswith(".zst") else _of_gz(packed)
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedShardError(f"{without_secrets(shard)}: it cannot be unpacked: {error}") from None


def _of_gz(packed: Path) -> Iterator[bytes]:
    with gzip.open(packed) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _of_zst(shard: str, packed: Path) -> Iterator[bytes]:
    """All frames of a file. ImportError without zstandard."""
    try:
        import zstandard
    except ImportError:
        raise ImportError(f'{without_secrets(shard)}: zst files need zstandard: pip install "mpitrain[zst]"') from None
    frame = None
    try:
        with packed.open("rb") as file:
            while data := file.read(_ZST_PIECE_BYTES):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    data = b""
                    if frame.eof:
                        data, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if frame is not None:
        raise EOFError("it is cut off")


def _again(fetch: Callable[[], str], shard: str, patience_s: float) -> str:
    """The result of `fetch`, called until it succeeds, with growing pauses. OSError if that takes too long, or there is no shard."""
    until, pause_s, shard = time.monotonic() + patience_s, _FIRST_PAUSE_S, without_secrets(shard)
    while True:
        try:
            return fetch()
        except OSError as error:
            if error.errno in _NO_REMEDY:
                raise OSError(f"data: {shard} cannot be fetched: {error}") from None
            if time.monotonic() + pause_s > until:
                raise OSError(f"data: {shard} cannot be fetched within {patience_s:g} s: {error}") from None
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # so that nodes do not come at the same time
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
