"""The HDF5 of a checkpoint: the rank files' datasets, whose bytes we write ourselves, and the index for everybody else.

h5py's low-level interface, because it is some times faster than the other for thousands of small objects.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from ckpt.manifest import FORMAT, VERSION, Dataset, Manifest, Tensor, encode_meta
from collectives.dtypes import TABLE

INDEX_NAME = "index.h5"
_MAX_ATTRIBUTE_BYTES = 60_000  # HDF5 keeps an attribute in its object's header, of at most 64 KiB
_HEADER_BYTES = 1 << 16  # more than the rest of a rank file: a handful of datasets without any attribute of size
_VISIBLE_S = 10.0  # how long a folder that rank 0 made may take to appear on another node (NFS)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let every failure to write `path` be an OSError that names it; neither os.pwrite nor HDF5 does so reliably."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is not None and error.strerror:
            raise OSError(error.errno, error.strerror.splitlines()[0], str(path)) from error
        raise OSError(f"{path}: {error}") from error
    except RuntimeError as error:  # what h5py makes of an error it cannot name, when it closes a file on a full disk
        raise OSError(f"{path}: {error}") from error


def create_rank_file(path: Path, elements: Mapping[str, int]) -> dict[str, Dataset]:
    """A new HDF5 file with one 1-D dataset for each dtype in `elements` (its length, above 0); returns where they lie.

    Contiguous, allocated early and never filled: their place is fixed, and the file is a valid one before its bytes are there.
    """
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    _wait_for(path.parent)
    _check_room(path, sum(count * TABLE[dtype].itemsize for dtype, count in elements.items()))
    datasets = {}
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(1, 64)
    # Nobody else sees a staged file, and locks fail on some Lustre and NFS mounts.
    access.set_file_locking(False, True)
    # The default bounds of the file's version: "latest" of HDF5 2 cannot be read by HDF5 1.10 (Debian 12).
    with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access)) as file:
        for dtype in sorted(elements):
            space = h5py.h5s.create_simple((elements[dtype],))
            dataset = h5py.h5d.create(file.id, dtype.encode(), _h5_type(dtype), space, plist)
            _mark_dtype(dataset, dtype)
            datasets[dtype] = Dataset(dataset.get_offset(), elements[dtype])
            del dataset
    return datasets


def _check_room(path: Path, nbytes: int) -> None:
    """OSError unless a file of `nbytes` of data can be made at `path`.

    HDF5 1.10 ends the process by a fault of its own when it cannot close a file on a full disk, so it is not let near one.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, bytes(_HEADER_BYTES))  # a full disk, or a quota that is used up
        os.ftruncate(fd, nbytes + _HEADER_BYTES)  # a limit on the size of files
        disk = os.fstatvfs(fd)
        if disk.f_bavail * disk.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)
        os.unlink(path)


def index_image(manifest: Manifest, scalars: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of `index.h5`: every tensor in its full shape, under its name, as a virtual dataset of the rank files' ranges.

    `scalars`: the values of the 0-D tensors, which HDF5 cannot make virtual. What a missing rank file held reads as NaN.
    The file is made in memory, which spares the file system thousands of small writes.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(1 << 20, False)
    with h5py.File(h5py.h5f.create(INDEX_NAME.encode(), fapl=access)) as file:
        root = file["/"].attrs
        root["format"], root["version"] = FORMAT, VERSION
        meta = encode_meta(manifest.meta)
        if len(meta) <= _MAX_ATTRIBUTE_BYTES:
            root["meta"] = meta
        # HDF5 makes the groups on the way: their names are the parts of the tensor's.
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        links.set_char_encoding(h5py.h5t.CSET_UTF8)
        sources = [
            (f.name.encode(), {dtype: h5py.h5s.create_simple((d.elements,)) for dtype, d in f.datasets.items()})
            for f in manifest.files
        ]
        for tensor in manifest.tensors.values():
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            space = h5py.h5s.create_simple(tensor.shape) if tensor.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            if tensor.shape and tensor.blocks:
                _map_blocks(plist, tensor, sources)
            dataset = h5py.h5d.create(file.id, tensor.name.encode(), _h5_type(tensor.dtype), space, plist, lcpl=links)
            if not tensor.shape:
                # The memory's type is named as the file's, so that the bits of a bf16 go in as they are.
                everything = h5py.h5s.create(h5py.h5s.SCALAR)
                dataset.write(everything, everything, scalars[tensor.name], _h5_type(tensor.dtype))
            _mark_dtype(dataset, tensor.dtype)
        file.flush()
        return file.id.get_file_image()


def _map_blocks(plist: h5py.h5p.PropDCID, tensor: Tensor, sources: list) -> None:
    if "float" in tensor.dtype:
        plist.set_fill_value(np.array(np.nan, np.float32))
    target = h5py.h5s.create_simple(tensor.shape)
    for block in tensor.blocks:
        name, spaces = sources[block.file]
        source = spaces[tensor.dtype]
        source.select_hyperslab((block.start,), (1,), block=(block.box.size,))
        target.select_hyperslab(block.box.offset, (1,) * len(tensor.shape), block=block.box.shape)
        plist.set_virtual(target, name, b"/" + tensor.dtype.encode(), source)


def _h5_type(dtype: str) -> h5py.h5t.TypeID:
    """The type in the file. bf16 is an HDF5 float of 1 + 8 + 7 bits, which h5py reads as float32 and h5dump prints as numbers."""
    if dtype != "bfloat16":
        return h5py.h5t.py_create(TABLE[dtype].numpy, logical=True)
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_precision(16)
    kind.set_ebias(127)
    return kind


def _mark_dtype(dataset: h5py.h5d.DatasetID, dtype: str) -> None:
    if dtype == "bfloat16":
        h5py.Dataset(dataset).attrs["dtype"] = dtype


def _wait_for(folder: Path) -> None:
    deadline = time.monotonic() + _VISIBLE_S
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
