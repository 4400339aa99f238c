"""What CuPy, torch and NCCL answer, in the versions there are, and what the binding makes of it: on stubs of the libraries."""

import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import TABLE
from collectives.transports.gpu import binding as bindings
from collectives.transports.gpu import cuda
from collectives.transports.gpu.binding import CuPyBinding, Gpu, NcclUnavailableError


class Runtime:
    """`cupy.cuda.runtime` of CuPy 14."""

    streamNonBlocking = 1  # noqa: N815

    def __init__(self, version: int = 12090) -> None:
        self.version, self.made = version, []  # type: ignore[var-annotated]
        self.streamWaitEvent = self.eventRecord = self.eventDestroy = None

    def runtimeGetVersion(self) -> int:  # noqa: N802
        return self.version

    def getDeviceCount(self) -> int:  # noqa: N802
        return 1

    def getDeviceProperties(self, index: int) -> dict[str, bytes]:  # noqa: N802
        return {"uuid": bytes([index]) * 16}  # each slice of a GPU has one of its own

    def deviceGetPCIBusId(self, index: int) -> str:  # noqa: N802
        return "0000:81:00.0"

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:  # noqa: N802
        self.made.append((flags, priority))
        return 0x52


def cupy_of(runtime: Runtime, *, nccl: bool = True) -> types.ModuleType:
    """A module `cupy` with NumPy's functions."""
    module = types.ModuleType("cupy")
    module.__dict__.update({name: getattr(np, name) for name in ("divide", "asarray", "empty", "array")})
    library = SimpleNamespace(
        available=nccl,
        get_version=lambda: 23203,
        get_unique_id=None,
        NcclCommunicator=None,
        groupStart=None,
        groupEnd=None,
    )
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        nccl=library,
        Device=lambda index: nullcontext(),
        Stream=type("Stream", (), {"from_external": None}),
    )
    return module


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    bindings.load.cache_clear()
    yield
    bindings.load.cache_clear()


def import_as(monkeypatch: pytest.MonkeyPatch, cupy: types.ModuleType, torch_cuda: str | None) -> None:
    """`import cupy` gives this, and torch is a build for that version of CUDA."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=torch_cuda)))  # type: ignore[arg-type]


def entered(seen: list[Any]) -> Any:
    class Stream:
        def __init__(self, stream: Any) -> None:
            seen.append(stream)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    return Stream


def test_no_call_of_cupy_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy 14 warns of `ExternalStream`, which under strict warnings is an error."""
    x, seen = np.full(3, 8, np.float32), []  # type: ignore[var-annotated]
    monkeypatch.setattr(bindings.CupyKernels, "_bytes", lambda self, flat: flat.view(np.uint8))
    cupy = cupy_of(Runtime())

    def old(stream: int) -> Any:
        warnings.warn("cupy.cuda.ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
        return entered(seen)(stream)

    cupy.cuda.ExternalStream = old
    cupy.cuda.Stream.from_external = staticmethod(lambda stream: entered(seen)(stream.__cuda_stream__()))
    CuPyBinding(cupy).divide(DeviceArray(x.ctypes.data, x.nbytes, 0, 0x77), 2, TABLE["float32"], 0x77)
    assert (seen, x.tolist()) == ([(0, 0x77)], [4, 4, 4])


class Driver:
    """CUDA's driver: which mode this thread is in, as regards captures."""

    def __init__(self) -> None:
        self.mode = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL, where each thread begins

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


def test_a_question_about_an_event_leaves_captures_alone() -> None:
    """CUDA ends a capture, of any thread, where a thread in its first mode asks; as the thread does that watches NCCL."""
    runtime, driver, relaxed = Runtime(), Driver(), 2
    asked: list[int] = []

    def query(event: int) -> int:
        asked.append(driver.mode)
        if event == 9:
            raise RuntimeError("cudaErrorIllegalAddress")
        return 600 if event == 1 else 0

    def check(status: int) -> None:
        assert status == 0

    runtime.eventQuery, runtime.check_status = query, check  # type: ignore[attr-defined]
    binding = CuPyBinding(cupy_of(runtime))
    binding._driver = driver
    assert [binding.event_done(event) for event in (1, 2)] == [False, True]
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        binding.event_done(9)
    assert asked == [relaxed] * 3
    assert driver.mode == 0, "the mode from before"


def test_the_slices_of_a_gpu_are_one_gpu() -> None:
    """NCCL goes by the bus id, and takes two slices of one GPU for one GPU; each has a UUID of its own."""
    binding = CuPyBinding(cupy_of(Runtime()))
    assert binding.gpu(0) == binding.gpu(1)
    assert binding.gpu(0) == Gpu(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "0000:81:00.0")


def test_the_host_s_name_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one machine have names of their own."""
    binding = CuPyBinding(cupy_of(Runtime()))
    before = binding.gpu(0)
    monkeypatch.setattr(bindings.os, "uname", lambda: SimpleNamespace(nodename="container"))
    assert binding.gpu(0) == before


def test_the_stream_has_the_highest_priority() -> None:
    runtime = Runtime()
    assert CuPyBinding(cupy_of(runtime)).stream_create() == 0x52
    assert runtime.made == [(1, -100)], "beyond CUDA's range, which ends at -5"


@pytest.mark.parametrize(("cupy_cuda", "torch_cuda"), [(12090, "12.8"), (13000, "13.0"), (12090, None)])
def test_versions_that_fit(monkeypatch: pytest.MonkeyPatch, cupy_cuda: int, torch_cuda: str | None) -> None:
    import_as(monkeypatch, cupy_of(Runtime(cupy_cuda)), torch_cuda)
    assert bindings.load().version() == 23203


def test_cupy_and_torch_of_different_cuda_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import_as(monkeypatch, cupy_of(Runtime(12090)), "13.0")
    expected = "CuPy is built for CUDA 12 and torch for CUDA 13; pip uninstall cupy-cuda12x, then pip install 'mpitrain\\[cuda13\\]'"
    with pytest.raises(NcclUnavailableError, match=expected):
        bindings.load()


def test_cupy_before_14(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = cupy_of(Runtime(12090))
    cupy.__version__ = "13.6.0"  # type: ignore[attr-defined]
    del cupy.cuda.Stream.from_external
    import_as(monkeypatch, cupy, "12.8")
    with pytest.raises(NcclUnavailableError, match=r"CuPy 13\.6\.0 is too old; pip install 'mpitrain\[cuda12\]'"):
        bindings.load()


def test_no_nccl_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import_as(monkeypatch, cupy_of(Runtime(13000), nccl=False), "13.0")
    with pytest.raises(
        NcclUnavailableError, match=r"no NCCL library \(libnccl.so.2\); pip install nvidia-nccl-cu13, or load"
    ):
        bindings.load()


@pytest.mark.parametrize(
    ("torch_cuda", "advice"),
    [("13.0", r"pip install 'mpitrain\[cuda13\]'"), (None, r"\[cuda12\]' or 'mpitrain\[cuda13\]'")],
)
def test_no_cupy(monkeypatch: pytest.MonkeyPatch, torch_cuda: str | None, advice: str) -> None:
    import_as(monkeypatch, cupy_of(Runtime()), torch_cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NcclUnavailableError, match=f"CuPy cannot be imported .*{advice}"):
        bindings.load()


def test_the_library_that_is_loaded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import_as(monkeypatch, cupy_of(Runtime()), "12.8")
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)  # of the stub
    monkeypatch.setattr(cuda, "support", lambda: cuda.Support(False, "as if"))
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\\0" * 4096)
    expected = bindings.library_path() or library  # of a torch that is loaded in this process
    mapped = np.memmap(library, np.uint8, "r")
    assert dict(cuda.info_lines())["NCCL"] == f"2.32.3 ({expected})"
    del mapped


@pytest.mark.parametrize("cuda_version", [12, 13])
def test_the_extras_bring_what_is_needed(cuda_version: int) -> None:
    """What the errors above tell people to install."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {line.split(">=")[0] for line in extras[f"cuda{cuda_version}"]}
    assert names == {f"cupy-cuda{cuda_version}x", f"nvidia-nccl-cu{cuda_version}"}
