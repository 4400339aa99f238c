"""The FLOP/s of a rank's device by its vendor: the reference for `mfu_vendor`.

GPUs: dense products, from data sheets (../machine/machines/ for 16 bits). CPUs: physical cores x clock x FLOPs a cycle of a core.
The FLOPs a cycle are two for each lane of each unit for fused multiply-adds: Intel's and AMD's optimization manuals and Arm's software
optimization guides name the units of each core. The clock is the highest one (cpufreq), which a core seldom keeps under such a load, so
the peak of a CPU is an upper bound. Virtual machines seldom tell this clock: they show the base clock, which products exceed.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.job.record.machine import machine

if TYPE_CHECKING:
    import torch

_FLOAT32 = {
    "A100": 19.5e12,
    "H100": 67e12,
    "H200": 67e12,
    "MI300X": 163.4e12,
}  # data sheets; torch's products do not use TF32
_OTHER_CARDS = ("PCIe", "NVL", "MIG")  # of the same names, with less: other data sheets

# FLOPs a cycle in fp32 of Arm's cores, by the number of the part: Neoverse N1, V1, N2, V2.
_ARM = {"0xd0c": 16, "0xd40": 32, "0xd49": 16, "0xd4f": 32}


def vendor_flops_per_s(
    device: "torch.device", dtype: "torch.dtype", *, cores: Iterable[int], threads: int
) -> float | None:
    """The peak of a rank in products of `dtype`; None if it is not known. `cores`, `threads`: of the rank, if it computes on CPUs."""
    if device.type == "cuda":
        import torch

        return gpu_flops_per_s(torch.cuda.get_device_name(device), dtype)
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    return cpu_flops_per_s(about, dtype, cores=cores, threads=threads, max_hz=_max_hz())


def gpu_flops_per_s(name: str, dtype: "torch.dtype") -> float | None:
    """The peak of a GPU with this name, as the driver tells it."""
    import torch

    known = {(its := machine.load(each)).name: its.flops for each in machine.names()}
    found = next((each for each in known if re.search(rf"\b{each}\b", name)), None)
    if found is None or (found != "A100" and any(card in name for card in _OTHER_CARDS)) or "MIG" in name:
        return None
    return _FLOAT32.get(found) if dtype is torch.float32 else known[found]


def cpu_flops_per_s(
    cpuinfo: str, dtype: "torch.dtype", *, cores: Iterable[int], threads: int, max_hz: float | None
) -> float | None:
    """The peak of some cores of a CPU; None if the kind of its cores or their highest clock, `max_hz`, is not known.

    Two threads of a core share its units, so physical cores count, and at most as many as a rank has threads. cpuinfo: the text of
    /proc/cpuinfo.
    """
    own = set(cores)
    tables = [dict(_pairs(block)) for block in cpuinfo.strip().split("\n\n")]
    mine = [table for table in tables if table.get("processor", "").isdecimal() and int(table["processor"]) in own]
    if not mine or max_hz is None:
        return None
    num = min(len({(each.get("physical id"), each.get("core id", each["processor"])) for each in mine}), threads)
    flops = _flops_a_cycle(mine[0], dtype)
    return None if flops is None else num * max_hz * flops


def _pairs(block: str) -> Iterable[tuple[str, str]]:
    for line in block.splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _flops_a_cycle(table: dict[str, str], dtype: "torch.dtype") -> int | None:
    """Of one core. A 16-bit dtype without instructions of its own is computed in fp32."""
    import torch

    if (part := table.get("CPU part")) is not None:
        return _ARM.get(part) if dtype is torch.float32 else None
    flags = set(table.get("flags", "").split())
    kind = "bf16" if dtype is torch.bfloat16 else "fp16" if dtype is torch.float16 else ""
    if kind and f"amx_{kind}" in flags:
        return 1024  # 16 x 16 x 32 multiply-adds in 16 cycles
    if "avx512f" in flags:
        # Two units of 512 bits, as in Intel's Xeon Gold and Platinum; smaller Xeons have one. AMD's Zen 4 (family 25) has half of them.
        flops = 32 if table.get("vendor_id") == "AuthenticAMD" and int(table.get("cpu family", 0)) < 26 else 64
        return flops * 2 if kind and f"avx512_{kind}" in flags else flops
    if {"avx2", "fma"} <= flags:
        return 32
    return None


def _max_hz() -> float | None:
    """The highest clock of the first core, with its boost; None in most virtual machines."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        return None
