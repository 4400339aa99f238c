"""Arrays in GPU memory. What needs no GPU is tested on an object that offers `__cuda_array_interface__`, as CuPy's and Numba's do."""

import logging
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from collectives.arrays import devices
from collectives.arrays.buffer import Buffer, DeviceArray, as_numpy
from collectives.arrays.dtypes import MOVED, TABLE, DTypeError

ROWS = TABLE | MOVED


class OnGPU:
    """What a GPU array tells of itself, with no memory behind it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float32, **said: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": self.dtype.str,
            "data": (0x7F00, False),
            "version": 3,
            "strides": None,
            "stream": 42,
            **said,
        }


@pytest.mark.parametrize("name", ROWS)
def test_a_gpu_array_is_described_and_not_touched(name: str) -> None:
    for options in ({}, {"writable": True}, {"write_only": True}):
        x = OnGPU((2, 3), ROWS[name].numpy)
        buffer = Buffer(x, "x", **options)
        assert buffer.dtype is ROWS[name]
        assert buffer.device == DeviceArray(address=0x7F00, nbytes=6 * ROWS[name].itemsize, index=None, stream=42)
        assert buffer.result() is x


def test_the_stream_and_the_device_of_each_version_of_the_interface() -> None:
    def device(**said: Any) -> DeviceArray | None:
        return Buffer(OnGPU((3,), **said), "x").device

    streams = [device(stream=stream) for stream in (None, 1, 2)]
    assert [d and d.stream for d in streams] == [None, 1, 2]
    old = device(version=2, stream=None)
    assert old is not None and old.stream == 1  # it tells none: the default stream waits for all others
    x: Any = OnGPU((3,))
    x.device = SimpleNamespace(id=5)  # as CuPy's arrays have it
    assert Buffer(x, "x").device == DeviceArray(0x7F00, 12, 5, 42)
    empty = OnGPU((0, 3), data=(0, False))
    assert Buffer(empty, "x").device == DeviceArray(0, 0, None, 42)


def test_only_the_type_string_is_enough() -> None:
    x = OnGPU((3,), np.int16)
    del x.dtype
    assert Buffer(x, "x").dtype is TABLE["int16"]
    x = OnGPU((3,), ml_dtypes.bfloat16)
    del x.dtype
    with pytest.raises(DTypeError, match="is not supported"):  # "<V2": two bytes of nobody knows what
        Buffer(x, "x")


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (
            OnGPU((4, 3), strides=(4, 16)),
            ValueError,
            r"x is not contiguous \(shape \(4, 3\), strides \(4, 16\)\); pass cupy",
        ),
        (OnGPU((4,), strides=(0,)), ValueError, "x is not contiguous"),
        (OnGPU((4,), np.clongdouble), DTypeError, "dtype complex256 is not supported"),
        (OnGPU((4,), ">f4"), TypeError, "x has byte order '>'; expected the machine's own"),
        (OnGPU((4,), mask=OnGPU((4,), bool)), ValueError, "x is masked; pass its data and its mask as two arrays"),
        (OnGPU((4,), data=(1, True)), ValueError, "x is read-only; pass a writable array"),
    ],
)
def test_what_does_not_fit_raises(x: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Buffer(x, "x", writable=True)


def test_strides_of_contiguous_arrays() -> None:
    for shape, strides in [((4, 3), (12, 4)), ((1, 3), (99, 4)), ((3, 1), (4, 99)), ((0, 3), (1, 1)), ((), ())]:
        assert Buffer(OnGPU(shape, strides=strides), "x").dtype is TABLE["float32"]


def test_host_memory_is_asked_for_where_it_is_meant() -> None:
    with pytest.raises(TypeError, match="x is in GPU memory; expected host memory"):
        as_numpy(OnGPU((3,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch could copy it here")
def test_a_copy_that_nobody_can_make_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "cupy", raising=False)
    buffer = Buffer(OnGPU((3,)), "x")
    with pytest.raises(
        TypeError, match="OnGPU in GPU memory cannot be copied to the host here; import cupy, or a torch"
    ):
        _ = buffer.flat
    with pytest.raises(AttributeError):
        _ = buffer.nonsense  # type: ignore[attr-defined]


def test_the_detour_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_said", set())
    for rank, level in (("0", logging.WARNING), ("1", logging.INFO)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        with caplog.at_level(logging.INFO, "collectives"):
            devices.say_once(f"slow on {rank}")
            devices.say_once(f"slow on {rank}")
        assert [(record.name, record.levelno, record.message) for record in caplog.records] == [
            ("collectives", level, f"slow on {rank}")
        ]
        caplog.clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in ROWS if hasattr(torch, name) and name != "float8_e8m0fnu"]
)  # no 0 in it
def test_gpu_tensors(name: str) -> None:
    x = torch.arange(6, device="cuda").view(2, 3).to(getattr(torch, name))
    expected = x.cpu()
    buffer = Buffer(x, "x", writable=True)
    assert buffer.device is not None
    assert (buffer.device.address, buffer.device.nbytes) == (x.data_ptr(), x.nbytes)
    assert buffer.device.index == torch.cuda.current_device()
    assert buffer.device.stream == torch.cuda.current_stream().cuda_stream
    assert (as_numpy(expected).reshape(-1) == buffer.flat).all()
    assert buffer.flat is buffer.flat
    assert torch.from_numpy(buffer.flat.view(np.uint8)).is_pinned()
    buffer.flat[...] = 1
    assert (as_numpy(x.cpu()) == as_numpy(expected)).all()
    assert buffer.result() is x
    assert (x.to(torch.complex64) == 1).all()
    reading = Buffer(x, "x")
    reading.flat[...] = 0
    assert reading.result() is x
    assert (x.to(torch.complex64) == 1).all(), "what is only read is not copied back"
    with pytest.raises(ValueError, match="x is not contiguous"):
        Buffer(x.t(), "x")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in TABLE if name != "bfloat16"])
def test_cupy_arrays(name: str) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed (pip install 'mpitrain[cuda12]')")
    x = cupy.arange(6).reshape(2, 3).astype(name)
    expected = x.get()
    buffer = Buffer(x, "x", writable=True)
    assert buffer.device is not None
    assert (buffer.device.address, buffer.device.nbytes, buffer.device.index) == (x.data.ptr, x.nbytes, x.device.id)
    assert (buffer.flat == expected.reshape(-1)).all()
    buffer.flat[...] = 1
    assert (x.get() == expected).all()
    assert buffer.result() is x
    assert (x == 1).all()
