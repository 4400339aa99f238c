"""Datasets of any HDF5 file as arrays in mapped memory."""

import os
from pathlib import Path

import h5py
import numpy as np


def map_vector(path: str | os.PathLike[str], name: str | None = None) -> np.ndarray:
    """A 1-D dataset of integers in an HDF5 file, memory-mapped and read-only. The file is not kept open.

    Args:
        path: the file.
        name: the dataset; None: "tokens", or the only 1-D dataset of integers at the top of the file.

    Raises:
        OSError: no HDF5 file, or it cannot be read.
        ValueError: there is no such dataset, or it is compressed or chunked, which a map cannot show.
    """
    path = Path(path)
    with h5py.File(path, "r") as file:
        vectors = [key for key, each in file.items() if isinstance(each, h5py.Dataset) and _is_vector(each)]
        wanted = name or ("tokens" if "tokens" in vectors or len(vectors) != 1 else vectors[0])
        dataset = file.get(wanted)
        if not isinstance(dataset, h5py.Dataset) or not _is_vector(dataset):
            raise ValueError(
                f"{path}: expected a 1-D dataset of integers named {wanted!r}, got {', '.join(vectors) or 'none'}"
            )
        if dataset.chunks is not None or dataset.is_virtual:
            raise ValueError(
                f"{path}: {wanted!r} is chunked or virtual, and only contiguous datasets can be mapped: "
                f"h5repack -l {wanted}:CONTI -f {wanted}:NONE {path} new.h5"
            )
        offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
    if offset is None or not shape[0]:
        raise ValueError(f"{path}: {wanted!r} is empty")
    return np.memmap(path, dtype, "r", offset, shape)


def _is_vector(dataset: h5py.Dataset) -> bool:
    return dataset.ndim == 1 and dataset.dtype.kind in "iu"
