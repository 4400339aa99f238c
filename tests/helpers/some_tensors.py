"""Tensors of all kinds for the tests of checkpoints, and how they are compared."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.convert.formats import torch_archive
from collectives.arrays.dtypes import DTYPES

# the machine's, or the one that ./mpirun/setup has put beside this Python, which need not be on the PATH
H5DUMP = shutil.which("h5dump") or shutil.which("h5dump", path=Path(sys.executable).parent)
reads_torch_files = pytest.mark.skipif(
    torch_archive.version_error(torch.__version__) is not None, reason="ckpt import reads no .pt file with this torch"
)
needs_h5dump = pytest.mark.skipif(H5DUMP is None, reason="needs h5dump (Debian: hdf5-tools)")


def random_array(dtype, shape, seed=0):
    """Random bits: NaNs, infinities and denormals included. For bool, random truth values."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype].numpy
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(rng.bytes(nbytes), kind).reshape(shape).copy()


# What torch, and safetensors, have a name for.
TORCH = tuple(name for name in DTYPES if hasattr(torch, name))
SAFETENSORS = tuple(name for name in TORCH if name != "complex128")


def as_torch(array):
    """The same bits; torch takes no bf16 and no float8 of NumPy's."""
    kind = array.dtype
    bits = array if kind.isbuiltin == 1 else array.view({1: "u1", 2: "i2"}[kind.itemsize])
    return torch.from_numpy(bits).view(getattr(torch, kind.name))


def everything(dtypes=tuple(DTYPES)):
    """All dtypes in several shapes, by name."""
    shapes = {"scalar": (), "vector": (7,), "matrix": (5, 3), "cube": (2, 3, 4), "empty": (0, 3), "ones": (1, 1)}
    return {
        f"{dtype}/{label}": random_array(dtype, shape, seed=i)
        for i, dtype in enumerate(dtypes)
        for label, shape in shapes.items()
    }


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def forget_peak() -> int:
    """Resident bytes of this process now, from which on `peak_bytes` counts."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak cannot be reset here: {error}")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that was resident since `forget_peak`, pages of mapped files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
