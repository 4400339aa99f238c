"""The table of element types: array <-> MPI <-> NCCL, and the type in which a reduction computes.

`TABLE` has the types that are moved and reduced; `MOVED` has types that are moved and kept in checkpoints, but never reduced; `DTYPES`
has both. Other types raise an error, because a wrong guess would add bit patterns instead of numbers.
"""

from contextlib import suppress
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ARITHMETIC = frozenset({"sum", "prod", "max", "min"})
OPS = ARITHMETIC | {"avg"}


class DTypeError(TypeError, ValueError):
    """An element type that is not in the table, or for which an operation is not defined.

    By Python's conventions this is a TypeError. A handler of ValueError, the error of other wrong arguments, catches it too.
    """


@dataclass(frozen=True, eq=False)  # each row exists once
class DType:
    """One element type.

    `mpi`: the name of mpi4py's datatype that the MPI library can reduce; None if MPI has no such type: MPI then moves it as bytes, and
    only our own algorithms, or MPI after a conversion to `accumulate`, reduce it. `accumulate`: the dtype in which a reduction adds.
    `ops`: the operations of reductions; empty for a type that is only moved.
    """

    name: str
    numpy: np.dtype
    mpi: str | None
    nccl: str | None
    accumulate: np.dtype
    ops: frozenset[str]

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def kind(self) -> str:
        """ "float", "complex", "bool" or "int"."""
        return next((kind for kind in ("float", "complex", "bool") if kind in self.name), "int")

    @property
    def is_half(self) -> bool:
        """Whether reductions widen this type (fp16, bf16) before they add."""
        return self.accumulate != self.numpy


def _row(name: str, mpi: str | None, nccl: str | None, accumulate: str | None = None) -> DType:
    numpy = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    floating = "float" in name
    return DType(name, numpy, mpi, nccl, np.dtype(accumulate or numpy), OPS if floating else ARITHMETIC)


TABLE: dict[str, DType] = {
    row.name: row
    for row in (
        _row("float64", "DOUBLE", "NCCL_FLOAT64"),
        _row("float32", "FLOAT", "NCCL_FLOAT32"),
        _row("float16", None, "NCCL_FLOAT16", accumulate="float32"),
        _row("bfloat16", None, "NCCL_BFLOAT16", accumulate="float32"),
        _row("int64", "INT64_T", "NCCL_INT64"),
        _row("int32", "INT32_T", "NCCL_INT32"),
        _row("int16", "INT16_T", None),
        _row("int8", "INT8_T", "NCCL_INT8"),
        _row("uint64", "UINT64_T", "NCCL_UINT64"),
        _row("uint32", "UINT32_T", "NCCL_UINT32"),
        _row("uint16", "UINT16_T", None),
        _row("uint8", "UINT8_T", "NCCL_UINT8"),
        # bool: sum and max are "any", prod and min are "all". An element is one byte, 0 or 1, so uint8's max and min are exact.
        _row("bool", "UINT8_T", None),
    )
}


def _moved(name: str) -> DType:
    numpy = np.dtype(getattr(ml_dtypes, name, name))
    return DType(name, numpy, None, None, numpy, frozenset())


# Neither MPI, NCCL nor our own kernels reduce these types. (To sum complex numbers, pass a view of them as floating-point numbers.)
_FLOAT8 = sorted(name for name in dir(ml_dtypes) if name.startswith("float8_"))  # torch and JAX have some of them
MOVED: dict[str, DType] = {name: _moved(name) for name in ("complex64", "complex128", *_FLOAT8)}
DTYPES = TABLE | MOVED

# All rows by their NumPy dtypes, which have the machine's own byte order.
NATIVE: dict[np.dtype, DType] = {row.numpy: row for row in DTYPES.values()}

# Results of `dtype_of`: to find the name of a NumPy dtype takes microseconds, as much as a small collective.
_answers: dict[object, DType] = {}


def dtype_of(dtype: object) -> DType:
    """The row of `DTYPES` for a dtype of any array library, a name of a dtype, or a scalar type. DTypeError for other dtypes."""
    try:
        return _answers[dtype]
    except (KeyError, TypeError):  # a new dtype, or an unhashable object, which is no dtype
        pass
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES and dtype is not None:  # NumPy would read None as float64
        with suppress(TypeError, ValueError):
            name = np.dtype(dtype).name  # type: ignore[call-overload]
    if name not in DTYPES:
        raise DTypeError(f"dtype {dtype} is not supported; expected one of {', '.join(DTYPES)}")
    with suppress(TypeError):
        _answers[dtype] = DTYPES[name]
    return DTYPES[name]


def number_of(dtype: object) -> DType:
    """`dtype_of` for callers that reduce: DTypeError also for types that are only moved."""
    row = dtype_of(dtype)
    if row.name not in TABLE:
        raise DTypeError(f"dtype {dtype} is not supported; expected one of {', '.join(TABLE)}")
    return row


def effective_op(dtype: DType, op: str) -> str:
    """The operation on the raw elements of `dtype` that gives `op`: for bool "max" instead of "sum", "min" instead of "prod".

    ValueError if `op` is unknown, DTypeError if `dtype` does not have it, TypeError if `op` is not a string (such as MPI.SUM).
    """
    if not isinstance(op, str):
        kind, known = f"{type(op).__module__}.{type(op).__qualname__}", ", ".join(sorted(OPS))
        raise TypeError(f"op is of type {kind}; expected a string, one of {known} (for MPI.SUM, 'sum')")
    if op not in OPS:
        raise ValueError(f"op {op!r} is unknown; expected one of {', '.join(sorted(OPS))}")
    if not dtype.ops:
        raise DTypeError(f"{dtype.name} is only moved, never reduced; reductions take {', '.join(TABLE)}")
    if op not in dtype.ops:
        raise DTypeError(
            f"op {op!r} is not defined for {dtype.name}; use a floating dtype, or op='sum' and divide yourself"
        )
    if dtype.name == "bool":
        return {"sum": "max", "prod": "min"}.get(op, op)
    return op
