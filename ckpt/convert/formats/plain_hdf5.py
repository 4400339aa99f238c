"""One plain HDF5 file for any tool: each tensor is a dataset with its name, and the values are in the file.

bf16 is a float type of 16 bits, as in a checkpoint's index: h5py reads it as float32, h5dump prints the numbers. Complex numbers are
compounds of r and i, which h5py reads as complex. float8 is `uint8` with the attribute `dtype`.
"""

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ckpt.format.boxes import Shape, rectangles
from ckpt.format.hdf5 import (
    MAX_ATTRIBUTE_BYTES,
    PAGE_BYTES,
    contiguous_properties,
    dataset_properties,
    h5_type,
    link_properties,
    mark_dtype,
)
from ckpt.format.manifest import encode_meta
from ckpt.reading.sources import Source, write_all
from collectives.arrays.dtypes import DTYPES

COMPRESSIONS = ("gzip", "zstd")
_CHUNK_BYTES = 1 << 20  # the most bytes that are compressed together
_CACHE_BYTES = 16 << 20  # HDF5 keeps a chunk until it is full
_GZIP_LEVEL, _ZSTD_LEVEL = 4, 3


def compression_error(compression: str | None) -> str | None:
    """The reason why `compression` cannot be used, or None."""
    if compression not in (None, *COMPRESSIONS):
        return f"compression is {compression!r}; expected None, 'gzip' or 'zstd'"
    if compression == "zstd":
        try:
            import hdf5plugin  # noqa: F401  (HDF5 knows the filter from then on)
        except ImportError:
            return "compression 'zstd' needs hdf5plugin: pip install 'mpitrain[zstd]' (or compression 'gzip', which needs nothing)"
    return None


def write(path: Path, sources: Sequence[Source], meta: Mapping[str, Any], compression: str | None = None) -> None:
    """Make a file, with `meta` as JSON in an attribute of its root, unless it is too long for an attribute. OSError or RuntimeError."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(PAGE_BYTES, PAGE_BYTES)
    access.set_cache(0, 521, _CACHE_BYTES, 1.0)
    access.set_file_locking(False, True)  # no other process sees it yet, and locks fail on some Lustre and NFS mounts
    links = link_properties()
    positions = []
    with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access)) as file:
        text = encode_meta(meta)
        if len(text) <= MAX_ATTRIBUTE_BYTES:
            file["/"].attrs["meta"] = text
        for source in sources:
            packed = compression is not None and source.nbytes > 0 and bool(source.shape)
            plist = _packed(source, compression) if packed else contiguous_properties()
            space = h5py.h5s.create_simple(source.shape) if source.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            name = source.name.encode()
            dataset = h5py.h5d.create(file.id, name, h5_type(source.dtype), space, plist, lcpl=links)
            mark_dtype(dataset, source.dtype)
            if packed:
                _write(dataset, source)
            elif source.nbytes:
                positions.append((source, dataset.get_offset()))
    # As in a checkpoint's own files: HDF5 gives the positions, `pwrite` writes the bytes.
    with open(path, "r+b", buffering=0) as file:
        for source, position in positions:
            write_all(file.fileno(), source, position)


def _packed(source: Source, compression: str | None) -> h5py.h5p.PropDCID:
    plist = dataset_properties()
    plist.set_chunk(_chunk(source.shape, _CHUNK_BYTES // DTYPES[source.dtype].itemsize))
    plist.set_shuffle()  # puts the exponents of floats side by side: they repeat, other bits rarely do
    if compression == "gzip":
        plist.set_deflate(_GZIP_LEVEL)
    else:
        import hdf5plugin

        plist.set_filter(hdf5plugin.Zstd.filter_id, h5py.h5z.FLAG_MANDATORY, (_ZSTD_LEVEL,))
    return plist


def _chunk(shape: Shape, elements: int) -> Shape:
    """The shape of the largest run of whole rows with at most `elements` elements. Written in flat order, chunks fill one by one."""
    for axis in range(len(shape)):
        inner = prod(shape[axis + 1 :])
        if inner <= elements:
            return (1,) * axis + (min(shape[axis], elements // inner), *shape[axis + 1 :])
    raise AssertionError(shape)


def _write(dataset: h5py.h5d.DatasetID, source: Source) -> None:
    kind = DTYPES[source.dtype].numpy
    at = 0
    for piece in source.pieces():
        elements = np.frombuffer(piece, kind)
        done = 0
        for box in rectangles(source.shape, at, at + elements.size):
            space = dataset.get_space()
            space.select_hyperslab(box.offset, (1,) * len(box.shape), block=box.shape)
            values = np.ascontiguousarray(elements[done : done + box.size].reshape(box.shape))
            dataset.write(h5py.h5s.create_simple(box.shape), space, values, h5_type(source.dtype))
            done += box.size
        at += elements.size
