"""CUDA-aware MPI: whether the MPI library accepts device addresses, and how to pass one.

A library without this support reads the address as host memory, which kills the process. So the library is asked for its support, and
a message of two bytes tests the answer. Without support the caller copies through host memory.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.devices import LEGACY_STREAM, DeviceArray
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import mpi_agrees
from collectives.environment import switch
from collectives.processes import loaded_libraries
from collectives.transports.gpu import binding
from collectives.transports.gpu.kernels import kernels_of, place
from collectives.transports.gpu.lane import lane_of

VARIABLE = "MPITRAIN_CUDA_AWARE"
_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h


class Support(NamedTuple):
    """Whether MPI accepts device addresses, and the source of this answer."""

    aware: bool
    why: str


@functools.cache
def support() -> Support:
    """Whether this process's MPI library accepts device addresses. Starts MPI, because the library answers only then."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    paths = loaded_libraries("libmpi", "libmpich")  # dlopen by name does not find mpi4py's libraries

    def find(name: str) -> Any:
        functions = (getattr(ctypes.CDLL(path), name, None) for path in paths)
        return next((function for function in functions if function is not None), None)

    return ask(find, paths, os.environ)


def agree(mpi: Any, make: Callable[[list[int]], tuple[Any, DeviceArray]] | None) -> Support:
    """Whether all ranks of `mpi` may pass device addresses to MPI: the same answer on all ranks, the first "no" if there is one.

    Collective. `make(values)`: an array of these bytes on the device, and its place, for a test message of two bytes to the next
    rank; None if no library of this rank can make one. The call takes microseconds, but callers should keep the answer.
    """
    answers = mpi.allgather(support() if make is not None else Support(False, "neither torch nor CuPy uses the GPU"))
    refusals = [answer for answer in answers if not answer.aware]
    if refusals:
        return refusals[0]
    assert make is not None
    failures = [why for why in mpi.allgather(_try(mpi, make)) if why]
    return Support(False, f"{answers[0].why}, but a try failed: {failures[0]}") if failures else answers[0]


def ask(find: Callable[[str], Any], libraries: Collection[str], environ: Mapping[str, str]) -> Support:
    """The rules of `support`. `find(name)`: a C function of the MPI library, or None; `libraries`: the paths of loaded libraries."""
    chosen = switch(VARIABLE, environ)
    if chosen is not None:
        return Support(chosen, f"{VARIABLE}={chosen:d}")
    cray = environ.get("MPICH_GPU_SUPPORT_ENABLED")
    if cray == "0":
        return Support(False, "MPICH_GPU_SUPPORT_ENABLED=0")
    query = find("MPIX_Query_cuda_support")  # Open MPI, and MPICH from 4 on
    if query is not None:
        answer = query()
        return Support(answer == 1, f"MPIX_Query_cuda_support() = {answer}")
    query = find("MPIX_GPU_query_support")  # MPICH and Cray MPICH
    if query is not None:
        said = ctypes.c_int(0)
        failed = query(ctypes.c_int(_MPICH_CUDA), ctypes.byref(said))
        return Support(not failed and said.value == 1, f"MPIX_GPU_query_support() = {said.value}")
    if cray == "1" and any("libmpi_gtl_cuda" in path for path in libraries):
        return Support(True, "MPICH_GPU_SUPPORT_ENABLED=1 and libmpi_gtl_cuda is loaded")
    return Support(False, f"the MPI library gives no answer; set {VARIABLE}=1 if the library takes device addresses")


def view(x: DeviceArray, dtype: DType) -> np.ndarray:
    """`x` as a NumPy array whose elements the host cannot read: for mpi4py, which uses only its address, and for kernels.py.

    The array is valid only within `calling`, and does not keep `x` alive.
    """
    return place(None, x.address, x.nbytes, dtype.numpy)


def reduces(dtype: DType, op: str) -> bool:
    """Whether MPI can reduce in device memory: it has the type, and needs no function of this package, which runs on the host."""
    return dtype.mpi is not None and mpi_agrees(op, dtype.numpy)


@contextmanager
def calling(*arrays: DeviceArray) -> Iterator[None]:
    """For a blocking MPI call on these arrays: waits for the kernels queued on their streams, and keeps NCCL off the device.

    No MPI request may outlive the block.
    """
    with ExitStack() as lanes:
        for index in sorted({x.index for x in arrays if x.index is not None}):
            lanes.enter_context(lane_of(index).mpi())
        wait_for(*arrays)
        yield


def wait_for(*arrays: DeviceArray) -> None:
    """Block until the kernels queued on the arrays' streams have ended."""
    for index, stream in sorted({(x.index, x.stream) for x in arrays if x.index is not None and x.stream is not None}):
        _synchronize(index, stream)


@functools.cache
def takes_messages(index: int) -> bool:
    """Whether MPI may send and receive messages between two ranks directly in the memory of device `index`. Not collective.

    A message may be unfinished for long, and NCCL cannot be kept off the device for that time. So the process must not have NCCL.
    """
    from mpi4py import MPI

    kernels = kernels_of(index)
    return not binding.is_available() and kernels is not None and agree(MPI.COMM_SELF, kernels.array).aware


def info_lines() -> list[tuple[str, str]]:
    """For `python -m collectives info`: the support of device memory. Starts MPI, and imports CuPy if it is installed."""
    aware, why = support()
    if importlib.util.find_spec("cupy") is not None:
        with suppress(ImportError):
            import torch  # noqa: F401 - `load` compares its version of CUDA with CuPy's
    try:
        nccl = binding.version_text(binding.load().version())
    except binding.NcclUnavailableError as error:
        nccl = f"no: {error}"
    if path := binding.library_path():  # the library may be loaded even if `load` has failed
        nccl += f" ({path})"
    return [("CUDA-aware MPI", f"{'yes' if aware else 'no'} ({why})"), ("NCCL", nccl)]


def _synchronize(index: int, stream: int) -> None:
    """Block until the kernels of a stream have ended, by torch if it uses the GPU, else by CuPy."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        if stream in (0, LEGACY_STREAM):  # ExternalStream(0) would be a new stream, not the default stream
            torch.cuda.default_stream(index).synchronize()
        else:
            torch.cuda.ExternalStream(stream, device=index).synchronize()
    else:
        assert cupy is not None, "device memory that is neither torch's nor CuPy's"
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.streamSynchronize(stream)


def _try(mpi: Any, make: Callable[[list[int]], tuple[Any, DeviceArray]]) -> str:
    """Send two bytes to the next rank. Returns a description of the error, "" if there is none."""
    from mpi4py import MPI

    (sent, source), (received, target) = make([mpi.rank % 256, 0x5A]), make([0, 0])
    try:
        with calling(source, target):
            mpi.Sendrecv(
                [MPI.buffer.fromaddress(source.address, 2), MPI.BYTE],
                (mpi.rank + 1) % mpi.size,
                recvbuf=[MPI.buffer.fromaddress(target.address, 2), MPI.BYTE],
                source=(mpi.rank - 1) % mpi.size,
            )
    except MPI.Exception as error:
        return str(error)
    expected, came = [(mpi.rank - 1) % mpi.size % 256, 0x5A], received.tolist()
    del sent  # keeps the memory alive until here
    return "" if came == expected else f"rank {mpi.rank} received {came} instead of {expected}"
