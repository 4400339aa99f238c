"""Exports the tensors of a checkpoint as safetensors, torch's `.pt`, `.npz` or one plain HDF5 file, for programs without `ckpt`.

This module chooses the tensors, their names and the files; `ckpt.convert.formats` writes a file of each format.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ckpt.convert.formats import npz, plain_hdf5, safetensors, torch_file
from ckpt.format.errors import naming
from ckpt.format.manifest import Manifest, name_error, nesting_error
from ckpt.reading.reader import Reader
from ckpt.reading.sources import PieceBuffer, Source, from_checkpoint, matching
from ckpt.storage.catalog import check_outside, read_manifest
from ckpt.storage.local import Output, check_room, write_file
from ckpt.storage.places import absolute, local_path
from ckpt.storage.progress import Progress, no_progress

SHARD_BYTES = 5 * 10**9  # of the files in a folder, like Hugging Face's
_HEADERS_BYTES = 1 << 20  # room for the headers of a file

Write = Callable[[Path, Sequence[Source]], None]
_WRITERS: dict[str, Write] = {
    ".safetensors": safetensors.write,
    ".pt": torch_file.write,
    ".pth": torch_file.write,
    ".npz": npz.write,
}
SUFFIXES = (*_WRITERS, ".h5", ".hdf5")


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    strip: str = "",
    shard_bytes: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress = no_progress,
) -> list[Path]:
    """Write the tensors of the checkpoint `path` to the file `out`, in the format of its suffix; returns the new files.

    `path` may be a URL. 32 MiB of memory are enough for tensors of any size. The files get their names when all of them are on the
    disk; after an error no file gets its name.

    Args:
        out: `*.safetensors`; `*.pt` or `*.pth`, a flat state dict for `torch.load` (only this format needs torch); `*.npz`;
            `*.h5` or `*.hdf5`, with the tensors as plain datasets and the meta as JSON. A folder means `model.safetensors` in
            it, in files of 5 GB and an index, like Hugging Face's models.
        only: a pattern such as "model/*", or several, of the names in the checkpoint; None: all.
        strip: a prefix, such as "model/", that is removed from the names that begin with it.
        shard_bytes: for safetensors: longer tensors go to several files with at most this number of tensor bytes each, and an index.
        compression: for HDF5: "gzip", or "zstd" (which needs hdf5plugin, also for reading).
        overwrite: replace existing files.
        verify: compare all bytes read with their checksums.
        progress: a function that gets the number of bytes read since its last call.

    bf16 is bf16 in safetensors and torch files, a 16-bit float type in HDF5, which h5py reads as float32, and two bytes (`V2`)
    in npz, which `array.view(ml_dtypes.bfloat16)` turns into numbers. float8 is float8 in safetensors and torch files, `uint8` with the
    attribute `dtype` in HDF5, and `V1` in npz. A dtype that a format lacks (complex128 in safetensors) is a ValueError.

    Raises ValueError for arguments that do not fit, FileExistsError, CheckpointError if the checkpoint is damaged, OSError if a
    file cannot be written.
    """
    folder = absolute(path)
    target, shard_bytes = _target(local_path(out, "out", "a file or a folder"), shard_bytes, compression)
    manifest = read_manifest(folder)
    names = _names(manifest, only, strip)
    # All files of an old export are removed, because there may be fewer new ones.
    several = shard_bytes is not None
    before = (
        safetensors.exported(target.parent, target.name) if several else [target] if os.path.lexists(target) else []
    )
    if before and not overwrite:
        raise FileExistsError(
            errno.EEXIST, "this file exists; overwrite=True (--overwrite) replaces it", str(before[0])
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    outputs: list[Output] = []
    with ExitStack() as ended, Reader(folder, manifest, verify=verify) as reader:

        def new_output(name: str) -> Output:
            outputs.append(Output(target.with_name(name)))
            outputs[-1].discard()  # left by a process that was killed
            ended.callback(outputs[-1].discard)
            return outputs[-1]

        buffer = PieceBuffer()
        found = [from_checkpoint(reader, manifest.tensors[name], new, buffer) for name, new in names.items()]
        sources = [source.watched(progress) for source in found]
        parts = safetensors.split(sources, shard_bytes) if shard_bytes else [sources]
        files = dict(
            zip(safetensors.file_names(len(parts), target.name) if several else [target.name], parts, strict=True)
        )
        write = _writer(target.suffix, manifest, compression)
        for name, part in files.items():
            output = new_output(name)
            if compression is None:
                check_room(output.temporary, _HEADERS_BYTES + sum(source.nbytes for source in part))
            os.close(output.make())
            with naming(output.path):
                write(output.temporary, part)
                output.flush()
        if len(files) > 1:
            output = new_output(safetensors.index_name(target.name))
            write_file(output.temporary, safetensors.index_text(files).encode())
        if before != [target]:  # one file is replaced in one step
            for old in before:
                old.unlink()
        for output in outputs:
            output.commit()
    return [output.path for output in outputs]


def _target(out: Path, shard_bytes: int | None, compression: str | None) -> tuple[Path, int | None]:
    """The file of `out`, and the size at which safetensors are split. ValueError for arguments that do not fit the format."""
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; expected at least 1")
    check_outside(out)
    if out.is_dir() or not out.suffix:
        out, shard_bytes = out / safetensors.ONE, shard_bytes or SHARD_BYTES
    if out.suffix not in SUFFIXES:
        raise ValueError(
            f"{out.name} has the suffix {out.suffix!r}; expected one of {', '.join(SUFFIXES)}, or a folder"
        )
    if shard_bytes is not None and out.suffix != ".safetensors":
        raise ValueError(f"{out.name} cannot be split by size; only safetensors can")
    if compression is not None and out.suffix not in (".h5", ".hdf5"):
        raise ValueError(f"{out.name} cannot be compressed; only HDF5 can (.h5, .hdf5)")
    if problem := plain_hdf5.compression_error(compression):
        raise ValueError(problem)
    return out, shard_bytes


def _names(manifest: Manifest, only: str | Sequence[str] | None, strip: str) -> dict[str, str]:
    """The names of the chosen tensors, each with its new name; ValueError if two new names are the same."""
    names = {name: name.removeprefix(strip) for name in matching(list(manifest.tensors), only)}
    seen: dict[str, str] = {}
    for name, new in names.items():
        if problem := name_error(new):
            raise ValueError(f"without {strip!r}, {name!r} is no valid name: {problem}")
        if new in seen:
            raise ValueError(
                f"without {strip!r}, {seen[new]!r} and {name!r} are both called {new!r}; only= leaves one out"
            )
        seen[new] = name
    if problem := nesting_error(seen):
        raise ValueError(f"without {strip!r}, {problem}; only= leaves one out")
    return names


def _writer(suffix: str, manifest: Manifest, compression: str | None) -> Write:
    if suffix in (".h5", ".hdf5"):
        return partial(plain_hdf5.write, meta=manifest.meta, compression=compression)
    return _WRITERS[suffix]
