"""The HDF5 files of a checkpoint: the datasets of its data files, and the index for other tools.

The module uses h5py's low-level interface, which is several times faster for thousands of small objects.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import xxhash

from ckpt.format.boxes import Shape
from ckpt.format.errors import naming
from ckpt.format.manifest import FORMAT, Tensor, encode_meta, version_of
from collectives.arrays.dtypes import DTYPES

INDEX_NAME = "index.h5"
PAGE_BYTES = 4096  # each dataset of a data file begins at a multiple of it
MAX_ATTRIBUTE_BYTES = 60_000  # HDF5 stores an attribute in its object's header of at most 64 KiB
_SCALAR = h5py.h5s.create(h5py.h5s.SCALAR)
_KEPT_BYTES = 64 << 20
_kept: dict[bytes, bytes] = {}  # the last images of indices, in order of their last use
_keeping = threading.Lock()  # a background save and a `reshard` may run at once


@contextmanager
def new_data_file(path: Path, elements: Mapping[str, int], mpi: Any = None) -> Iterator[dict[str, h5py.h5d.DatasetID]]:
    """A new HDF5 file with a 1-D dataset for each dtype in `elements` (its length, above 0), open until the block ends.

    The datasets are contiguous, allocated early and never filled: their places are fixed, and the file is valid before its values are
    written. `mpi`: mpi4py's communicator of the ranks that open the file with parallel HDF5. It does not change the file's bytes.
    """
    plist = contiguous_properties()
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(PAGE_BYTES, PAGE_BYTES)
    if mpi is None:
        # No other process sees a staged file, and locks fail on some Lustre and NFS mounts.
        access.set_file_locking(False, True)
    else:
        access.set_fapl_mpio(mpi, mpi.Get_info())
    # The default bounds of the file's version: HDF5 1.10 (Debian 12) cannot read "latest" of HDF5 2.
    with naming(path), h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access)) as file:
        datasets = {}
        for dtype in sorted(elements):
            space = h5py.h5s.create_simple((elements[dtype],))
            datasets[dtype] = h5py.h5d.create(file.id, dtype.encode(), h5_type(dtype), space, plist)
            mark_dtype(datasets[dtype], dtype)
        yield datasets
        del datasets


def index_image(
    tensors: Mapping[str, Tensor],
    lengths: Mapping[str, Mapping[str, int]],
    meta: Mapping[str, Any],
    scalars: Mapping[str, bytes],
) -> bytes:
    """The bytes of `index.h5`: every tensor in its full shape, under its name, as a virtual dataset of the rank files' ranges.

    `lengths`: for each data file, in the manifest's order, the elements of its datasets. `scalars`: the values of the 0-D tensors,
    which HDF5 cannot make virtual. Values of a missing rank file read as NaN. The file is made in memory, which saves thousands of
    small writes.
    """
    image = _kept_frame(list(tensors.values()), lengths)
    with h5py.File(h5py.h5f.open_file_image(image, h5py.h5f.FILE_IMAGE_OPEN_RW)) as file:
        text = encode_meta(meta)
        if len(text) <= MAX_ATTRIBUTE_BYTES:
            file.attrs["meta"] = text
        for name, value in scalars.items():
            # The memory has the type of the file, so that HDF5 does not convert the bits of a bf16.
            memory = np.frombuffer(value, np.uint8)
            h5py.h5d.open(file.id, name.encode()).write(_SCALAR, _SCALAR, memory, h5_type(tensors[name].dtype))
        file.flush()
        return file.id.get_file_image()


def _kept_frame(tensors: Sequence[Tensor], lengths: Mapping[str, Mapping[str, int]]) -> bytes:
    """The index without the parts that change between saves: `meta` and the values of scalars.

    A training saves the same tensors many times, and HDF5 needs 0.25 to 0.3 ms per tensor, so the last indices are kept.
    """
    key = xxhash.xxh3_128_digest(msgspec.msgpack.encode((lengths, tensors)))
    with _keeping:
        frame = _kept.pop(key, None) or _make_frame(tensors, lengths)
        _kept[key] = frame
        while len(_kept) > 1 and sum(map(len, _kept.values())) > _KEPT_BYTES:
            del _kept[next(iter(_kept))]
    return frame


def _make_frame(tensors: Sequence[Tensor], lengths: Mapping[str, Mapping[str, int]]) -> bytes:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(1 << 20, False)
    with h5py.File(h5py.h5f.create(INDEX_NAME.encode(), fapl=access)) as file:
        file.attrs["format"], file.attrs["version"] = FORMAT, version_of(tensors)
        links = link_properties()
        sources = [
            (name.encode(), {dtype: h5py.h5s.create_simple((count,)) for dtype, count in datasets.items()})
            for name, datasets in lengths.items()
        ]
        names = list(lengths)
        # h5py needs some microseconds per object, so objects are used again.
        spaces: dict[Shape, h5py.h5s.SpaceID] = {(): _SCALAR}
        for tensor in tensors:
            plist = dataset_properties()
            space = spaces.get(tensor.shape)
            if space is None:
                space = spaces[tensor.shape] = h5py.h5s.create_simple(tensor.shape)
            if tensor.shape and tensor.blocks:
                _map_blocks(plist, tensor, space, sources)
            if not tensor.shape:
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            dataset = h5py.h5d.create(file.id, tensor.name.encode(), h5_type(tensor.dtype), space, plist, lcpl=links)
            mark_dtype(dataset, tensor.dtype)
            _mark_placement(dataset, tensor, names)
        file.flush()
        return file.id.get_file_image()


def dataset_properties() -> h5py.h5p.PropDCID:
    """The properties of every dataset."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # so that the same tensors make the same bytes
    return plist


def contiguous_properties() -> h5py.h5p.PropDCID:
    """The properties of a dataset in one range of its file, allocated at once and never filled: its bytes are not written by HDF5."""
    plist = dataset_properties()
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return plist


def link_properties() -> h5py.h5p.PropLCID:
    """The properties of a link with a tensor's name: HDF5 makes the groups in the name."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def _map_blocks(plist: h5py.h5p.PropDCID, tensor: Tensor, target: h5py.h5s.SpaceID, sources: list) -> None:
    if (nan := _nan(tensor.dtype)) is not None:
        plist.set_fill_value(nan)
    for block in tensor.blocks:
        name, spaces = sources[block.file]
        source = spaces[tensor.dtype]
        source.select_hyperslab((block.start,), (1,), block=(block.box.size,))
        target.select_hyperslab(block.offset, (1,) * len(tensor.shape), block=block.shape)
        plist.set_virtual(target, name, b"/" + tensor.dtype.encode(), source)
    target.select_all()


@cache
def _text_type(length: int) -> h5py.h5t.TypeID:
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(length)
    return kind


@cache
def _nan(dtype: str) -> np.ndarray | None:
    """HDF5's fill value for missing values; None for integers and bools."""
    row = DTYPES[dtype]
    if row.kind not in ("float", "complex"):
        return None
    if _is_float8(dtype):
        return np.array(np.nan, row.numpy).view(np.uint8)
    return np.array(np.nan, np.float32 if row.kind == "float" else row.numpy)  # HDF5 converts between floats


def _is_float8(dtype: str) -> bool:
    return dtype.startswith("float8")


@cache
def h5_type(dtype: str) -> h5py.h5t.TypeID:
    """The type in the file.

    bf16 is an HDF5 float of 1 + 8 + 7 bits, which h5py reads as float32 and h5dump prints as numbers. Complex numbers are h5py's
    compound of r and i. The kinds of float8 are bytes, because in most of them the largest exponent has numbers, unlike in HDF5.
    """
    if _is_float8(dtype):
        return h5py.h5t.STD_U8LE
    if dtype != "bfloat16":
        return h5py.h5t.py_create(DTYPES[dtype].numpy, logical=True)
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_precision(16)
    kind.set_ebias(127)
    return kind


def mark_dtype(dataset: h5py.h5d.DatasetID, dtype: str) -> None:
    """Store the name of a dtype that h5py does not have."""
    if dtype == "bfloat16" or _is_float8(dtype):
        h5py.Dataset(dataset).attrs["dtype"] = dtype


def _mark_placement(dataset: h5py.h5d.DatasetID, tensor: Tensor, files: Sequence[str]) -> None:
    """Attributes for people: the files in which the parts of a tensor lie, and the mesh axes along which it was cut."""
    attributes = {"placement": "; ".join(f"{files[b.file]} {b.box}" for b in tensor.blocks)}
    if tensor.axes is not None:
        attributes["axes"] = ", ".join(axis or "-" for axis in tensor.axes)
    for key, text in attributes.items():
        value = text.encode()
        if 0 < len(value) <= MAX_ATTRIBUTE_BYTES:
            kind = _text_type(len(value))
            h5py.h5a.create(dataset, key.encode(), kind, _SCALAR).write(np.array(value), mtype=kind)
