"""NumPy's `.npz`: a zip file with an array, in NumPy's own format, under each name.

NumPy has no bf16 and no float8. As with `numpy.savez`, these arrays are read as raw bytes (dtypes `V2`, `V1`), which NumPy cannot
compute with; `numpy.load(file)[name].view(ml_dtypes.bfloat16)` makes them numbers.
"""

from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from numpy.lib import format as npy

from ckpt.reading.sources import Source
from collectives.arrays.dtypes import DTYPES

_ENDING = ".npy"
_ZIP64_BYTES = (1 << 31) - 4096  # zipfile must know longer members in advance


def write(path: Path, sources: Sequence[Source]) -> None:
    """Make a file. OSError if it cannot be written. ValueError for names of which NumPy would take one for another."""
    names = {source.name for source in sources}
    if hidden := sorted(name for name in names if f"{name}{_ENDING}" in names):
        raise ValueError(
            f"two tensors are called {hidden[0]} and {hidden[0]}{_ENDING}, and NumPy finds the first one under both names in a .npz; "
            "rename one, or leave it out"
        )
    with ZipFile(path, "w") as archive:  # not compressed
        for source in sources:
            kind = DTYPES[source.dtype].numpy
            descr = npy.dtype_to_descr(kind) if kind.isbuiltin == 1 else f"|V{kind.itemsize}"
            about = {"descr": descr, "fortran_order": False, "shape": source.shape}
            with archive.open(
                ZipInfo(f"{source.name}{_ENDING}"), "w", force_zip64=source.nbytes > _ZIP64_BYTES
            ) as member:
                npy.write_array_header_1_0(member, about)
                for piece in source.pieces():
                    member.write(piece)
