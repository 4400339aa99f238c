"""One view of all libraries' arrays: the same memory, or a clear error. JAX: test_arrays_jax.py; in GPU memory: test_devices.py."""

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from collectives.arrays.buffer import Buffer, as_numpy, is_torch, like
from collectives.arrays.dtypes import MOVED, TABLE, DTypeError


@pytest.mark.rest
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_views_share_memory_in_both_libraries(name: str, shape: tuple[int, ...]) -> None:
    for x in (np.zeros(shape, TABLE[name].numpy), torch.zeros(shape, dtype=getattr(torch, name))):
        view = as_numpy(x, writable=True)
        assert view.shape == shape
        assert view.dtype == TABLE[name].numpy
        view[...] = 1
        assert x.sum() == view.size if name != "bool" else bool(x.all())
        buffer = Buffer(x, "x", writable=True)
        assert buffer.flat.shape == (view.size,)
        assert buffer.dtype is TABLE[name]
        buffer.flat[...] = 0
        assert buffer.result() is x
        assert not x.any()
        assert buffer.device is None


@pytest.mark.parametrize("name", [name for name in MOVED if hasattr(torch, name)])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_what_is_only_moved_is_viewed_in_both_libraries(name: str, shape: tuple[int, ...]) -> None:
    for x in (np.zeros(shape, MOVED[name].numpy), torch.zeros(shape, dtype=torch.float32).to(getattr(torch, name))):
        view = as_numpy(x, writable=True)
        assert view.shape == shape
        assert view.dtype == MOVED[name].numpy
        view[...] = 2
        buffer = Buffer(x, "x", writable=True)
        assert buffer.dtype is MOVED[name]
        assert (buffer.flat == 2).all() and buffer.flat.shape == (view.size,)
        assert buffer.result() is x
    assert (x.to(torch.complex64) == 2).all(), "the same memory"


def test_bf16_keeps_its_values() -> None:
    x = torch.tensor([1.5, -2.0, 3e38, float("inf")], dtype=torch.bfloat16)
    view = as_numpy(x)
    assert view.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(view.astype(np.float32), x.float().numpy())


@pytest.mark.parametrize("name", [name for name in TABLE | MOVED if hasattr(torch, name)])
@pytest.mark.parametrize("size", [0, 4])
def test_like_gives_the_library_of_the_dtype_without_a_copy(name: str, size: int) -> None:
    dtype = (TABLE | MOVED)[name].numpy
    flat = np.zeros(size, dtype)
    assert like(flat, dtype) is flat
    tensor = like(flat, getattr(torch, name))
    assert is_torch(tensor)
    assert tensor.dtype == getattr(torch, name)
    tensor.fill_(1)
    assert (flat == 1).all()


def test_a_parameter_is_taken_as_its_data() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    as_numpy(parameter, writable=True)[...] = 7
    assert parameter.detach().tolist() == [7.0, 7.0, 7.0]


def test_contiguous_parts_are_fine() -> None:
    assert as_numpy(np.arange(12).reshape(4, 3)[1:3]).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert as_numpy(torch.arange(12).view(4, 3)[1:3]).tolist() == [[3, 4, 5], [6, 7, 8]]
    x = np.zeros((4, 3))
    assert np.shares_memory(Buffer(x[1:3], "x").flat, x)


class Mine(np.ndarray):
    pass


def test_subclasses_of_ndarray_are_their_data(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    for x in (mapped, np.zeros((2, 3), np.float32).view(Mine)):
        buffer = Buffer(x, "x", writable=True)
        assert type(buffer.flat) is np.ndarray and buffer.flat.shape == (6,)
        buffer.flat[...] = np.arange(6)
        assert buffer.result() is x
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


class OnlyDLPack:
    """An array of some library that speaks DLPack and nothing else."""

    def __init__(self, x: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self._x, self._device = x, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@pytest.mark.parametrize("wrap", [OnlyDLPack, memoryview, lambda x: array.array("f", x)])
def test_what_offers_dlpack_or_a_buffer_is_an_array_too(wrap: Any) -> None:
    x = wrap(np.arange(3, dtype=np.float32))
    buffer = Buffer(x, "x", writable=True)
    assert buffer.flat.tolist() == [0, 1, 2]
    buffer.flat[...] = 7
    assert buffer.result() is x
    assert as_numpy(x).tolist() == [7, 7, 7]


def test_what_offers_them_and_does_not_fit() -> None:
    elsewhere = OnlyDLPack(np.zeros(3), device=(10, 0))
    with pytest.raises(TypeError, match=r"x is a .*OnlyDLPack on DLPack's device \(10, 0\); expected host memory"):
        Buffer(elsewhere, "x")
    strings = OnlyDLPack(np.array(["a"]))
    with pytest.raises(TypeError, match=r"x is a .*OnlyDLPack that cannot be viewed in host memory: "):
        Buffer(strings, "x")
    with pytest.raises(ValueError, match="x is read-only; pass a writable array"):
        Buffer(b"abc", "x", writable=True)
    with pytest.raises(DTypeError, match="dtype complex256 is not supported"):
        Buffer(memoryview(np.zeros(3, np.clongdouble)), "x")


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        ([1.0], TypeError, "gradient is a builtins.list; expected an array of NumPy, torch, CuPy or JAX"),
        (np.float32(1), TypeError, "gradient is a numpy.float32; expected an array of NumPy, torch, CuPy or JAX"),
        (None, TypeError, "gradient is a builtins.NoneType; expected"),
        (np.zeros(3, object), TypeError, "dtype object is not supported; expected one of float64"),
        (np.zeros(3, "f4,i4"), TypeError, "is not supported; expected one of float64"),
        (np.zeros(3, "M8[s]"), TypeError, "dtype datetime64[s] is not supported; expected one of float64"),
        (
            torch.zeros(3, dtype=torch.complex64).conj(),
            TypeError,
            "gradient is a tensor that NumPy cannot view: Can't call",
        ),
        (np.zeros(3, ">f4"), TypeError, "gradient has byte order '>'; expected the machine's own"),
        (np.zeros((4, 3))[:, 1], ValueError, "gradient is not contiguous (shape (4,), strides (24,)); pass numpy.asc"),
        (np.zeros((4, 3)).T, ValueError, "gradient is not contiguous"),
        (
            torch.zeros(4, 3).t(),
            ValueError,
            "gradient is not contiguous (shape (3, 4), strides (1, 3)); pass gradient.",
        ),
        (torch.zeros(1).expand(4), ValueError, "gradient is not contiguous"),
        (torch.zeros(3, device="meta"), TypeError, "gradient is on meta; expected host memory"),
        (torch.eye(3).to_sparse(), TypeError, "gradient is a torch.sparse_coo tensor; expected a dense one"),
        (np.ma.masked_array(np.zeros(2), [True, False]), ValueError, "gradient is masked; pass its data and its mask"),
    ],
)
def test_what_cannot_be_viewed_raises_and_says_what_to_do(x: Any, kind: type[Exception], text: str) -> None:
    for view in (as_numpy, Buffer):
        with pytest.raises(kind) as caught:
            view(x, name="gradient")
        assert text in str(caught.value)


def test_read_only_arrays_can_be_read_but_not_written() -> None:
    x = np.arange(3)
    x.flags.writeable = False
    assert as_numpy(x).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="out is read-only; pass a writable array"):
        as_numpy(x, writable=True, name="out")
    for options in ({"writable": True}, {"write_only": True}):
        with pytest.raises(ValueError, match="out is read-only; pass a writable array"):
            Buffer(x, "out", **options)
