"""What the gauges of hardware tell: NVML by a recorded library, the host, and the vendors' peaks."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpitrain.job.record.gauges import host
from mpitrain.job.record.gauges.nvml import GpuGauges, GpuId, id_of
from mpitrain.job.record.gauges.peak import cpu_flops_per_s, gpu_flops_per_s

pynvml = pytest.importorskip("pynvml")

GPU = GpuId("8d2ac1b4", "00000000:3b:00.0")


def library(known: dict[str, str], reasons: int = 0, parents: dict[str, str] | None = None, **changes: Any) -> Any:
    """pynvml with the answers of an H100. `known`: handles by UUID or bus address. `parents`: of handles of MIG parts."""

    def find(name: str) -> str:
        if name not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return known[name]

    def of_gpu(value: Any) -> Any:
        def asked(handle: str, *_: Any) -> Any:
            assert handle not in (parents or {}), "NVML answers for whole GPUs alone"
            return value

        return asked

    constants = {name: value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}
    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetHandleByPciBusId": find,
        "nvmlDeviceIsMigDeviceHandle": lambda handle: int(handle in (parents or {})),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: (parents or {})[handle],
        "nvmlDeviceGetUtilizationRates": of_gpu(SimpleNamespace(gpu=97, memory=41)),
        "nvmlDeviceGetPowerUsage": of_gpu(698_123),
        "nvmlDeviceGetTemperature": of_gpu(61),
        "nvmlDeviceGetCurrentClocksEventReasons": of_gpu(reasons),
    }
    assert all(hasattr(pynvml, name) for name in functions)
    of_errors = {"NVMLError": pynvml.NVMLError, "NVML_TEMPERATURE_GPU": pynvml.NVML_TEMPERATURE_GPU}
    return SimpleNamespace(**{**constants, **of_errors, **functions, **changes})


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_the_figures_of_a_gpu() -> None:
    whole = {"gpu_percent": 97.0, "gpu_watts": 698.123, "gpu_celsius": 61.0, "gpu_throttled": 0.0}
    by_uuid = library({"GPU-8d2ac1b4": "gpu"}, reasons=pynvml.nvmlClocksEventReasonSwPowerCap)
    assert GpuGauges(GPU, by_uuid).sample() == whole
    assert GpuGauges(GPU, library({"00000000:3b:00.0": "gpu"})).sample() == whole
    hot = library({"GPU-8d2ac1b4": "gpu"}, reasons=pynvml.nvmlClocksEventReasonHwThermalSlowdown)
    assert GpuGauges(GPU, hot).sample() == {**whole, "gpu_throttled": 1.0}
    part = GpuGauges(GPU, library({"MIG-8d2ac1b4": "part"}, parents={"part": "gpu"})).sample()
    assert part == {name: value for name, value in whole.items() if name != "gpu_percent"}
    quiet = library({"GPU-8d2ac1b4": "gpu"}, nvmlDeviceGetPowerUsage=refuse)
    assert GpuGauges(GPU, quiet).sample() == {name: value for name, value in whole.items() if name != "gpu_watts"}


@pytest.mark.parametrize("lib", [None, library({}), library({}, nvmlInit=refuse)])
def test_without_nvml_there_is_no_figure(lib: Any) -> None:
    assert GpuGauges(GPU, lib).sample() == {}


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    found = GpuGauges(id_of(torch.device("cuda", torch.cuda.current_device()))).sample()
    assert 0 < found["gpu_celsius"] < 120 and found["gpu_throttled"] in (0, 1)


def test_the_load_of_the_cores_and_the_bytes_of_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    gauges = host.HostGauges()
    assert gauges.sample() == {}, "there is no rate in no time"
    began = time.process_time()
    while time.process_time() - began < 0.25:
        pass
    found = gauges.sample()
    assert 0 < found["cpu_percent"] <= 100
    assert found["net_sent_bytes_per_s"] >= 0 and found["net_received_bytes_per_s"] >= 0
    monkeypatch.setattr(host, "psutil", None)
    assert host.HostGauges().sample() == {}


def core(number: int, of: int, **more: str) -> str:
    about = {"processor": str(number), "physical id": "0", "core id": str(of), **more}
    return "\n".join(f"{name}\t: {value}" for name, value in about.items())


XEON = {"vendor_id": "GenuineIntel", "cpu family": "6", "flags": "fma avx2 avx512f avx512_bf16 amx_bf16"}
ZEN4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "fma avx2 avx512f avx512_bf16"}


@pytest.mark.parametrize(
    ("about", "dtype", "expected"),
    [
        (XEON, torch.float32, 64),
        (XEON, torch.bfloat16, 1024),
        (XEON, torch.float16, 64),
        (ZEN4, torch.float32, 32),
        (ZEN4, torch.bfloat16, 64),
        ({"flags": "fma avx2"}, torch.bfloat16, 32),
        ({"flags": "sse2"}, torch.float32, None),
        ({"CPU part": "0xd40"}, torch.float32, 32),
        ({"CPU part": "0x000"}, torch.float32, None),
    ],
)
def test_the_peak_of_cpus(about: dict[str, str], dtype: torch.dtype, expected: int | None) -> None:
    """Four threads on two cores, of which a rank has three."""
    cpuinfo = "\n\n".join(core(number, number % 2, **about) for number in range(4)) + "\n"
    peak = cpu_flops_per_s(cpuinfo, dtype, cores={0, 1, 2}, threads=3, max_hz=3e9)
    assert peak == (None if expected is None else 2 * 3e9 * expected)
    for cores, threads, max_hz, num in (
        ({0, 2}, 2, 3e9, 1),
        ({0, 1}, 1, 3e9, 1),
        ({9}, 1, 3e9, None),
        ({0}, 1, None, None),
    ):
        peak = cpu_flops_per_s(cpuinfo, dtype, cores=cores, threads=threads, max_hz=max_hz)
        assert peak == (None if expected is None or num is None else num * 3e9 * expected)


def test_the_peak_of_gpus() -> None:
    assert gpu_flops_per_s("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert gpu_flops_per_s("NVIDIA A100-SXM4-80GB", torch.float16) == gpu_flops_per_s(
        "NVIDIA A100-PCIE-40GB", torch.float16
    )
    assert gpu_flops_per_s("AMD Instinct MI300X", torch.float32) == 163.4e12
    for other in (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Tesla T4",
    ):
        assert gpu_flops_per_s(other, torch.bfloat16) is None
