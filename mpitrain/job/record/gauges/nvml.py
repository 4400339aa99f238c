"""The state of a rank's own GPU by NVML (nvidia-ml-py, of the optional extra `gauges`).

CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES hides and reorders them for CUDA alone. So the GPU is looked up by its UUID,
and if NVML does not know it, by its address on the PCI bus.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

try:
    import pynvml
except ImportError:  # an optional package: then there are no figures of GPUs
    pynvml = None


class GpuId(NamedTuple):
    """A GPU as CUDA knows it: its UUID without a prefix, and its address on the PCI bus, such as 00000000:3b:00.0."""

    uuid: str
    bus_id: str


def id_of(device: "torch.device") -> GpuId:
    """The identity of a CUDA device."""
    import torch

    about: Any = torch.cuda.get_device_properties(device)
    return GpuId(str(about.uuid), f"{about.pci_domain_id:08x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0")


class GpuGauges:
    """Utilisation, power, temperature and throttling of one GPU.

    Of a part of a GPU (MIG) NVML does not know the utilisation; the other figures are then those of the whole GPU.

    Args:
        gpu: the GPU.
        library: the module pynvml, or what has its names; None: not installed, and `sample` is empty.
    """

    def __init__(self, gpu: GpuId, library: Any = pynvml) -> None:
        self._lib, self._handle, self._is_part = library, None, False
        if library is None:
            return
        try:
            library.nvmlInit()
        except library.NVMLError:  # such as no driver, or a GPU of AMD
            return
        for find, name in (
            (library.nvmlDeviceGetHandleByUUID, f"GPU-{gpu.uuid}"),
            (library.nvmlDeviceGetHandleByUUID, f"MIG-{gpu.uuid}"),
            (library.nvmlDeviceGetHandleByPciBusId, gpu.bus_id),
        ):
            try:
                self._handle = find(name)
                break
            except library.NVMLError:
                continue
        if self._handle is not None and self._asked(library.nvmlDeviceIsMigDeviceHandle):
            self._is_part = True
            self._handle = self._asked(library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle)

    def sample(self) -> dict[str, float]:
        """gpu_percent (of the time with a kernel), gpu_watts, gpu_celsius, gpu_throttled (0 or 1), as far as the GPU tells them.

        Throttled: the clock is lowered by heat, by the power brake or by the hardware. The limit of power does not count, because a GPU
        under full load is at this limit by design.
        """
        if (lib := self._lib) is None or self._handle is None:
            return {}
        figures: dict[str, float] = {}
        if not self._is_part and (rates := self._asked(lib.nvmlDeviceGetUtilizationRates)) is not None:
            figures["gpu_percent"] = float(rates.gpu)
        if (milliwatts := self._asked(lib.nvmlDeviceGetPowerUsage)) is not None:
            figures["gpu_watts"] = milliwatts / 1e3
        if (celsius := self._asked(lib.nvmlDeviceGetTemperature, lib.NVML_TEMPERATURE_GPU)) is not None:
            figures["gpu_celsius"] = float(celsius)
        if (reasons := self._asked(lib.nvmlDeviceGetCurrentClocksEventReasons)) is not None:
            slow = lib.nvmlClocksEventReasonSwThermalSlowdown | lib.nvmlClocksEventReasonHwThermalSlowdown
            slow |= lib.nvmlClocksEventReasonHwPowerBrakeSlowdown | lib.nvmlClocksEventReasonHwSlowdown
            figures["gpu_throttled"] = float(bool(reasons & slow))
        return figures

    def _asked(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function of NVML for this GPU; None if the GPU or the driver does not tell."""
        try:
            return function(self._handle, *args)
        except self._lib.NVMLError:
            return None
