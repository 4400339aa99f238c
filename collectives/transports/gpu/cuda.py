"""CUDA-aware MPI: whether the MPI library here takes device addresses, and how to hand it one.

A library that does not, reads the address as host memory and the process dies of it: so support is asked for, never assumed, and
the first answer is tried out with two bytes. Where it is missing the caller stages through the host.
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
from collectives.transports.gpu import binding
from collectives.transports.gpu.kernels import kernels_of, place
from collectives.transports.gpu.lane import lane_of

VARIABLE = "MPITRAIN_CUDA_AWARE"
_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h


class Support(NamedTuple):
    """Whether MPI takes device addresses, and how that is known."""

    aware: bool
    why: str


@functools.cache
def support() -> Support:
    """Whether this process's MPI library takes device addresses. Starts MPI, without which it cannot answer."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    paths = binding.loaded_libraries("libmpi", "libmpich")  # mpi4py loads them out of sight of a plain look-up by name

    def find(name: str) -> Any:
        functions = (getattr(ctypes.CDLL(path), name, None) for path in paths)
        return next((function for function in functions if function is not None), None)

    return ask(find, paths, os.environ)


def agree(mpi: Any, make: Callable[[list[int]], tuple[Any, DeviceArray]] | None) -> Support:
    """Whether all ranks of `mpi` may hand device addresses to it: the same answer everywhere, the first "no" if there is one.

    Collective. `make`: makes an array of these bytes on the device, and says where it lies: two bytes are sent round the ranks to
    see that they arrive. None where nothing here could. Cheap (microseconds), but keep the answer.
    """
    answers = mpi.allgather(support() if make is not None else Support(False, "neither torch nor CuPy uses the GPU"))
    refusals = [answer for answer in answers if not answer.aware]
    if refusals:
        return refusals[0]
    assert make is not None
    failures = [why for why in mpi.allgather(_try(mpi, make)) if why]
    return Support(False, f"{answers[0].why}, but a try failed: {failures[0]}") if failures else answers[0]


def ask(find: Callable[[str], Any], libraries: Collection[str], environ: Mapping[str, str]) -> Support:
    """The rules of `support`. `find`: a C function of the MPI library by its name, or None; `libraries`: the paths loaded."""
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
    """`x` as a NumPy array for mpi4py alone, which reads the address and no more: its elements are out of the host's reach.

    The transports that transports/gpu/kernels.py is the arithmetic of take it. Only within `calling`. It does not keep `x` alive.
    """
    return place(None, x.address, x.nbytes, dtype.numpy)


def reduces(dtype: DType, op: str) -> bool:
    """Whether MPI's own reduction can work on device memory: it has the type, and calls no function of ours, which the host runs."""
    return dtype.mpi is not None and mpi_agrees(op, dtype.numpy)


@contextmanager
def calling(*arrays: DeviceArray) -> Iterator[None]:
    """Around a blocking MPI call on these arrays: the kernels queued on their streams have ended, and NCCL stands still.

    No request may outlive the block.
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
    """Whether a message between two ranks may be given to MPI where it lies on device `index`. Not collective.

    Such a message may be under way for long, and nothing can keep NCCL off the device meanwhile: so only where NCCL never comes.
    """
    from mpi4py import MPI

    kernels = kernels_of(index)
    return not binding.is_available() and kernels is not None and agree(MPI.COMM_SELF, kernels.array).aware


def info_lines() -> list[tuple[str, str]]:
    """For `python -m collectives info`: what there is for device memory. Starts MPI, and imports CuPy if it is installed."""
    aware, why = support()
    if importlib.util.find_spec("cupy") is not None:
        with suppress(ImportError):
            import torch  # noqa: F401 - whose version of CUDA is to be CuPy's
    try:
        nccl = binding.version_text(binding.load().version())
    except binding.NcclUnavailableError as error:
        nccl = f"no: {error}"
    if path := binding.library_path():  # found, whatever else is missing
        nccl += f" ({path})"
    return [("CUDA-aware MPI", f"{'yes' if aware else 'no'} ({why})"), ("NCCL", nccl)]


def _synchronize(index: int, stream: int) -> None:
    """Block until the kernels of a stream have ended, by the library that made it."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        if stream in (0, LEGACY_STREAM):  # ExternalStream(0) would be a new stream, which has nothing to wait for
            torch.cuda.default_stream(index).synchronize()
        else:
            torch.cuda.ExternalStream(stream, device=index).synchronize()
    else:
        assert cupy is not None, "device memory that is neither torch's nor CuPy's"
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.streamSynchronize(stream)


def _try(mpi: Any, make: Callable[[list[int]], tuple[Any, DeviceArray]]) -> str:
    """Send two bytes to the next rank; what went wrong, or nothing."""
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
    del sent  # kept until here
    return "" if came == expected else f"rank {mpi.rank} received {came} instead of {expected}"
