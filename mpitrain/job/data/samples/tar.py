"""Samples in tar files, such as images and pairs, as a map-style dataset."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from collectives.launcher import launched_rank
from collectives.texts import without_secrets
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import DamagedSampleError, kind_of
from mpitrain.job.data.documents.reading import MappedFile
from mpitrain.job.data.documents.tar import Place, TarReader
from mpitrain.job.data.remarks import is_first, keep
from mpitrain.job.data.shards import list_shards

T = TypeVar("T")


class _Index(NamedTuple):
    """Where all samples are. `ends`: of each shard, among all samples. `begins`: the first byte of each sample in its shard.

    `links`: of each shard, see TarReader.
    """

    ends: np.ndarray
    begins: np.ndarray
    links: Sequence[Mapping[int, Place]]


class TarSamples(Generic[T]):
    """The samples of tar files, as WebDataset names them: neighbouring files that are equal up to the first dot are one sample.

        def decode(parts): return torch.from_numpy(np.load(io.BytesIO(parts["image.npy"]))), int(parts["cls"])
        dataset = TarSamples("images/train-{000..127}.tar", decode)

    The first use reads the headers of all files, to know where each sample begins: 8 bytes for each sample are kept. Copies in worker
    processes have the same index. The files are mapped into memory, and not unpacked.

    Args:
        paths: shards: names with globs and brace ranges, or URLs; compressed ones, too. See docs/data.md.
        decode: makes a sample of its parts: their bytes by what follows the first dot of their names, and its name as `__key__`, a str.
            For worker processes it has to be a function at the top of a module.
        cache, cache_bytes: the folder of this node for remote and compressed shards (None: $TMPDIR, else /tmp), and its limit. All
            shards should fit.

    Raises:
        ValueError: no shard, or one that is no tar file, is damaged, or has files of a sample that stand apart, or two with one name.
        DamagedSampleError: of one sample, `decode` has failed, or a part cannot be read. The text names the sample.
        OSError: a shard cannot be read.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        decode: Callable[[dict[str, Any]], T],
        *,
        cache: str | None = None,
        cache_bytes: int = 64 << 30,
    ) -> None:
        self._shards, self._decode = list_shards([paths] if isinstance(paths, str) else paths), decode
        if other := [path for path in self._shards.paths if kind_of(path) != "tar"]:
            raise ValueError(f"TarSamples: expected tar files, got {without_secrets(other[0])}")
        its = self._shards
        self._cache = ShardCache(cache, limit_bytes=cache_bytes, checksums=its.checksums, versions=its.versions)
        self._tells = _tells()
        if self._tells and (kept := keep(its.token)) is not None:
            weakref.finalize(self, kept.close)  # as long as this lives: workers end with each epoch
        self._files: dict[int, MappedFile] = {}
        self._found: _Index | None = None

    def __len__(self) -> int:
        return int(self._index().ends[-1])

    def __getitem__(self, number: int) -> T:
        ends, begins, links = self._index()
        if not 0 <= number < len(begins):
            raise IndexError(f"TarSamples: expected a sample from 0 to {len(begins) - 1}, got {number}")
        shard = int(np.searchsorted(ends, number, side="right"))
        end = int(begins[number + 1]) if number + 1 < ends[shard] else None
        file, begin = self._file(shard), int(begins[number])
        cut = TarReader(file, begin=begin, end=end, links=links[shard]).cut(begin, file.size)
        parts: dict[str, Any] = {**cut.parts(0)}
        if "__key__" in parts:
            raise DamagedSampleError(f"{cut.where(0)}: a part has the name __key__, which is that of the sample's name")
        parts["__key__"] = cut.key(0).decode(errors="replace")
        try:
            return self._decode(parts)
        except Exception as error:
            text = f"{cut.where(0)}: decode has raised {type(error).__name__}: {error}"
            raise DamagedSampleError(text) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def _index(self) -> _Index:
        if self._found is None:
            begins, links, remarks = [], [], []
            for shard in range(len(self._shards.paths)):
                reader = TarReader(self._file(shard))
                begins.append(reader.begins)
                links.append(reader.entries.links)
                remarks += [reader.remark] * bool(reader.remark)
            if remarks and self._tells and is_first(self._shards.token):
                number = f" (the first of {len(remarks)} tar files of which there is something to tell)"
                warnings.warn(remarks[0] + number * (len(remarks) > 1), stacklevel=3)
            self._found = _Index(np.cumsum([len(each) for each in begins]), np.concatenate(begins), links)
        return self._found

    def _file(self, shard: int) -> MappedFile:
        """A shard, which stays mapped: on a network file system opening is slow."""
        if shard not in self._files:
            path = self._shards.paths[shard]
            with self._cache.local(path, int(self._shards.sizes[shard])) as local:
                self._files[shard] = MappedFile(local, without_secrets(path))
        return self._files[shard]


def _tells() -> bool:
    """Whether the datasets that this process makes warn: all ranks see the same files. Copies in workers are for `is_first`: workers
    have no variables of the launcher, and may read the files before this process does."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return launched_rank() <= 0 and (worker is None or worker.id == 0)
