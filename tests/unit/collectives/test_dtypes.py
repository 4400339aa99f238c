"""The table of element types."""

import ml_dtypes
import numpy as np
import pytest
import torch

from collectives.arrays.dtypes import ARITHMETIC, MOVED, OPS, TABLE, DTypeError, dtype_of, effective_op, number_of


@pytest.mark.parametrize("name", TABLE | MOVED)
def test_every_way_to_name_a_dtype_finds_its_row(name: str) -> None:
    row = (TABLE | MOVED)[name]
    assert row.name == name
    for way in (name, row.numpy, row.numpy.type, np.zeros(1, row.numpy).dtype, getattr(torch, name, name)):
        assert dtype_of(way) is row
        assert dtype_of(way) is row  # and again, from what it remembers


def test_python_types_and_short_names() -> None:
    assert [dtype_of(t).name for t in (float, int, bool, "f4", "<i2")] == [
        "float64",
        "int64",
        "bool",
        "float32",
        "int16",
    ]


@pytest.mark.parametrize("name", [name for name in TABLE | MOVED if hasattr(torch, name)])
def test_sizes_agree_with_numpy_and_torch(name: str) -> None:
    row = (TABLE | MOVED)[name]
    assert row.itemsize == row.numpy.itemsize == torch.empty(0, dtype=getattr(torch, name)).element_size()


def test_what_is_only_moved() -> None:
    assert {"complex64", "complex128", "float8_e4m3fn", "float8_e5m2"} <= set(MOVED)
    assert not set(MOVED) & set(TABLE)
    for row in MOVED.values():
        assert not row.ops
        for op in OPS:
            with pytest.raises(
                DTypeError, match=f"^{row.name} is only moved, never reduced; reductions take float64, fl.*, bool$"
            ):
                effective_op(row, op)
        with pytest.raises(DTypeError, match=f"dtype {row.name} is not supported; expected one of float64, .*, bool$"):
            number_of(row.name)
    assert number_of("f4") is TABLE["float32"]
    with pytest.raises(DTypeError, match="dtype object is not supported"):
        number_of(np.dtype(object))


def test_halves_and_only_they_are_reduced_in_fp32() -> None:
    assert {row.name for row in TABLE.values() if row.is_half} == {"float16", "bfloat16"}
    for row in TABLE.values():
        assert row.accumulate == (np.float32 if row.is_half else row.numpy)
        # what MPI cannot add as it is has no MPI type: bf16 as an integer would add bit patterns
        assert (row.mpi is None) == row.is_half
    assert dtype_of(ml_dtypes.bfloat16) is TABLE["bfloat16"]


@pytest.mark.parametrize(
    "unknown",
    [
        np.clongdouble,
        "complex32",
        torch.complex32,
        np.longdouble,
        np.dtype("S3"),
        np.dtype("f4,i4"),
        object,
        None,
        [1],
        3,
    ],
)
def test_what_is_not_in_the_table_raises(unknown: object) -> None:
    for _ in range(2):
        with pytest.raises(DTypeError, match=r"is not supported; expected one of float64, float32, float16, bfloat16"):
            dtype_of(unknown)


def test_ops() -> None:
    for row in TABLE.values():
        floating = "float" in row.name
        assert row.ops == (OPS if floating else ARITHMETIC)
        if not floating:
            with pytest.raises(DTypeError, match=f"op 'avg' is not defined for {row.name}; use a floating dtype"):
                effective_op(row, "avg")
        with pytest.raises(ValueError, match=r"op 'mean' is unknown; expected one of avg, max, min, prod, sum"):
            effective_op(row, "mean")
        for op in row.ops:
            if row.name != "bool":
                assert effective_op(row, op) == op
    assert [effective_op(TABLE["bool"], op) for op in ("sum", "max", "prod", "min")] == ["max", "max", "min", "min"]


def test_a_wrong_dtype_is_both_a_type_and_a_value_error() -> None:
    assert issubclass(DTypeError, TypeError)
    assert issubclass(DTypeError, ValueError)
