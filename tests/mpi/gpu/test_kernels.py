"""Kernels for GPU memory give the bits that the host's arithmetic gives: torch's on the CPU, CuPy's as NumPy, and both on a GPU."""

import gc
from typing import Any

import numpy as np
import pytest
from device_model import ModelCupyKernels, ModelTorchKernels, Untouchable

from collectives import Communicator
from collectives.arrays import reduction
from collectives.arrays.buffer import address_of
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.transports.gpu.kernels import Kernels, kernels_of

pytestmark = pytest.mark.ranks(3)

SIZES = (0, 1, 1031)


def on_gpu() -> Kernels:
    """Of the GPU that torch, or CuPy, uses here."""
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    kernels = kernels_of(torch.cuda.current_device())
    assert kernels is not None
    return kernels


@pytest.fixture(params=["torch", "cupy", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return {"torch": ModelTorchKernels, "cupy": ModelCupyKernels, "gpu": on_gpu}[request.param]()


def anything(row: DType, size: int, seed: int) -> np.ndarray:
    """Elements of all kinds: random bits, so infinities, tiny numbers and no numbers among them."""
    bits = np.random.default_rng(seed).integers(0, 256, size * row.itemsize, np.uint8)
    return bits % 2 > 0 if row.name == "bool" else bits.view(row.numpy)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    with np.errstate(invalid="ignore"):
        nan = one != one
        if not np.array_equal(nan, other != other):
            return False
    one, other = one[~nan], other[~nan]
    return one.tobytes() == other.tobytes()


def test_every_reduction_as_on_the_host(kernels: Kernels) -> None:
    for row in TABLE.values():
        for op in sorted(row.ops):
            raw = effective_op(row, op)
            if not kernels.reduces(row, raw):
                assert row.name in ("uint16", "uint32", "uint64")
                assert raw in ("max", "min")
                continue
            for size in SIZES:
                one, other = (anything(row, size, seed) for seed in (1, 2))
                expected = np.empty_like(one)
                reduction.reduce_into(expected, [one, other], raw, row)
                for out, parts in ((0, (1, 2)), (1, (1, 2)), (2, (1, 2))):  # `out` may be one of the parts
                    places = [upload(kernels, x, row) for x in (np.zeros_like(one), one, other)]
                    kernels.reduce_into(places[out], [places[i] for i in parts], raw, row)
                    assert same(download(kernels, places[out], row), expected), (row.name, op, size, out)


def test_a_division_is_a_division(kernels: Kernels) -> None:
    for row in (row for row in TABLE.values() if "avg" in row.ops):
        for divisor in (1, 2, 3, 7, 1000, 4097):
            x = anything(row, 5000, divisor)
            expected = x.copy()
            reduction.divide(expected, divisor, row)
            there = upload(kernels, x, row)
            kernels.divide(there, divisor, row)
            assert same(download(kernels, there, row), expected), (row.name, divisor)


def test_memory_lasts_as_long_as_an_array_on_it(kernels: Kernels) -> None:
    row = TABLE["float32"]
    part = kernels.empty(1000, row.numpy)[10:20]
    assert part.nbytes == 40
    others = [kernels.empty(1000, row.numpy) for _ in range(20)]
    gc.collect()
    assert all(not address_of(x) <= address_of(part) < address_of(x) + x.nbytes for x in others), (
        "given to somebody else"
    )
    assert kernels.empty(0, row.numpy).size == 0


def test_an_array_for_the_try(kernels: Kernels) -> None:
    array, there = kernels.array([7, 0x5A])
    assert array.tolist() == [7, 0x5A]
    assert there.nbytes == 2 and there.address


def test_the_model_notices_a_host_that_touches(comm: Communicator) -> None:
    x = ModelTorchKernels().empty(4, np.dtype(np.float32))
    assert isinstance(x[1:].view(np.uint8), Untouchable)

    def write() -> None:
        x[:] = 0

    def divide() -> None:
        x.__itruediv__(2)

    for touch in (write, divide, lambda: x[0], x.copy, lambda: np.concatenate([x, x]), lambda: x + 1):
        with pytest.raises(AssertionError, match="device memory"):
            touch()


def upload(kernels: Kernels, values: np.ndarray, row: DType) -> np.ndarray:
    """A place on the device with these values, which it keeps alive."""
    there = kernels.empty(values.size, row.numpy)
    bytes_there(kernels, there)[...] = library_array(kernels, values)
    return there


def download(kernels: Kernels, there: np.ndarray, row: DType) -> np.ndarray:
    raw = bytes_there(kernels, there)
    raw = raw.cpu().numpy() if hasattr(raw, "cpu") else raw.get() if hasattr(raw, "get") else raw
    return np.array(raw).view(row.numpy)


def bytes_there(kernels: Kernels, there: np.ndarray) -> Any:
    return kernels._open(there.view(np.uint8), TABLE["uint8"])


def library_array(kernels: Kernels, values: np.ndarray) -> Any:
    if not values.nbytes:
        return kernels._array(0)
    return kernels.array(values.view(np.uint8).tolist())[0]
