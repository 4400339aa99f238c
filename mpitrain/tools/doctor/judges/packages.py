"""Judges libraries: GPUs, NCCL, CUDA-aware MPI, parallel HDF5. Pure: facts in, findings out."""

from typing import NamedTuple

from mpitrain.tools.doctor.findings import Finding, Level, ok
from mpitrain.tools.doctor.packages import Gpu, Hdf5


class Aware(NamedTuple):
    """Whether MPI takes addresses of a GPU, and why it says so."""

    aware: bool
    why: str


def judge_gpu(its: Gpu, aware: Aware | None = None, num_ranks: int = 1) -> list[Finding]:
    """The GPUs of a host with `num_ranks` ranks."""
    if its.failure:
        return [
            Finding(
                Level.ERROR,
                "torch",
                f"it cannot be used: {its.failure}",
                "import torch works in a new process",
                "run python -c 'import torch' on that host, and reinstall torch as its message says",
            )
        ]
    cpu_build = not its.cuda
    if its.wrong:
        return [
            Finding(
                Level.ERROR,
                "GPU",
                "; ".join(its.wrong),
                "each GPU multiplies two matrices",
                "see nvidia-smi -q and dmesg (Xid), and that this torch supports the GPU and the driver",
            )
        ]
    if not its.devices:
        if its.files and cpu_build:
            return [
                Finding(
                    Level.WARNING,
                    "GPU",
                    f"{len(its.files)} here ({its.files[0]}), but torch {its.torch} is a build for CPUs",
                    "a torch with CUDA",
                    "pip install torch from https://download.pytorch.org/whl/cu126 or newer",
                )
            ]
        if its.files:
            return [
                Finding(
                    Level.ERROR,
                    "GPU",
                    f"{len(its.files)} here (driver {its.driver or 'unknown'}), but torch {its.torch} with CUDA {its.cuda} sees none",
                    "torch.cuda.device_count() > 0",
                    "unset CUDA_VISIBLE_DEVICES, update the driver to that CUDA, or docker run --gpus all",
                )
            ]
        return [ok("GPU", f"none; torch {its.torch} computes on CPUs")]
    driver = f", driver {its.driver}" if its.driver else ""
    findings = []
    text = f"{len(its.devices)} x {its.devices[0]}{driver}, torch {its.torch}"
    if num_ranks > len(its.devices):
        findings.append(
            Finding(
                Level.WARNING,
                "GPU",
                f"{num_ranks} ranks share {text}",
                "a GPU for each rank: NCCL takes one rank per GPU",
                f"start {len(its.devices)} ranks on each host",
            )
        )
    else:
        findings.append(ok("GPU", text))
    if its.no_nccl:
        findings.append(
            Finding(
                Level.WARNING,
                "NCCL",
                its.no_nccl,
                "NCCL by CuPy, for collectives between GPUs",
                "pip install 'mpitrain[cuda12]' or 'mpitrain[cuda13]', as torch.version.cuda says",
            )
        )
    else:
        findings.append(ok("NCCL", its.nccl))
    if aware is not None:
        if aware.aware:
            findings.append(ok("CUDA-aware MPI", f"yes ({aware.why})"))
        else:
            level = Level.WARNING if its.no_nccl else Level.NOTE
            cost = "arrays on GPUs are copied through host memory" if its.no_nccl else "NCCL carries the collectives"
            findings.append(
                Finding(
                    level,
                    "CUDA-aware MPI",
                    f"no ({aware.why}); {cost}",
                    "an MPI built with CUDA, or NCCL",
                    "use the cluster's MPI with CUDA (MPITRAIN_MPI=system ./mpirun/setup)",
                )
            )
    return findings


def judge_hdf5(its: Hdf5) -> list[Finding]:
    """h5py, and its parallel driver."""
    if its.failure:
        return [
            Finding(
                Level.ERROR,
                "HDF5",
                f"h5py cannot be used: {its.failure}",
                "import h5py works in a new process",
                "pip install --force-reinstall h5py; an h5py built for another MPI than mpi4py's crashes",
            )
        ]
    text = f"h5py {its.version}, HDF5 {its.library}"
    if not its.parallel:
        remedy = "none is needed; checkpoint.driver mpio needs ./mpirun/setup hdf5, or an h5py built with HDF5_MPI=ON"
        return [
            Finding(Level.NOTE, "HDF5", f"{text}: not parallel", "parallel, only for checkpoint.driver mpio", remedy)
        ]
    if len(its.mpi_libraries) > 1:
        return [
            Finding(
                Level.ERROR,
                "HDF5",
                f"{text} brings a second MPI into the process: {', '.join(its.mpi_libraries)}",
                "HDF5 built with the MPI of mpi4py",
                "build h5py again with that MPI's mpicc: ./mpirun/setup hdf5",
            )
        ]
    if its.save_failure:
        return [
            Finding(
                Level.ERROR,
                "HDF5",
                f"{text}: a parallel save failed: {its.save_failure}",
                "a checkpoint with driver mpio",
                "use checkpoint.driver posix, or build h5py again: ./mpirun/setup hdf5",
            )
        ]
    return [ok("HDF5", f"{text}, parallel; a small parallel save works")]
