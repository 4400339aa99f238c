"""Measures libraries in a process of their own: torch and its GPUs, NCCL, parallel HDF5. Their import may be slow, or crash.

`python -m mpitrain.tools.doctor.packages gpu|hdf5|need ...` prints facts as JSON in its last line. `ask_*` starts that process.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from collectives.launcher import environment_of_program
from collectives.processes import end_with_parent
from collectives.programs import python

_LIMIT_S = 60.0


class Gpu(NamedTuple):
    """The GPUs of a host.

    `devices`: names with memory and compute capability; `files`: device files of NVIDIA's driver.
    `wrong`: devices on which a product failed. `nccl`: its version, or `no_nccl`: why it cannot be used. `failure`: torch cannot run.
    """

    torch: str = ""
    cuda: str = ""
    driver: str = ""
    files: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    nccl: str = ""
    no_nccl: str = ""
    failure: str = ""


class Hdf5(NamedTuple):
    """h5py: whether it is parallel (else `reason`), the MPI libraries in a process that uses it, and the result of a parallel save."""

    version: str = ""
    library: str = ""
    parallel: bool = False
    reason: str = ""
    mpi_libraries: tuple[str, ...] = ()
    save_failure: str = ""
    failure: str = ""


class Need(NamedTuple):
    """The bytes that a run with the settings of the run's folder needs on the node that needs most; 0 if they are not known. `shared`:
    of `total`, those in node memory."""

    shared: int = 0
    total: int = 0
    failure: str = ""


def ask_gpu() -> Gpu:
    """The GPUs of this host."""
    facts, failure = _ask("gpu")
    return Gpu(**{**_tuples(facts), "failure": failure or facts.get("failure", "")})


def ask_hdf5() -> Hdf5:
    """Parallel HDF5 on this host. A parallel h5py saves a small checkpoint, in one process."""
    facts, failure = _ask("hdf5")
    return Hdf5(**{**_tuples(facts), "failure": failure or facts.get("failure", "")})


def ask_need(settings: Path, num_ranks: int, num_nodes: int) -> Need:
    """The memory of a node that a run with the settings in the file `settings` needs."""
    facts, failure = _ask("need", str(settings), str(num_ranks), str(num_nodes))
    return Need(**{**facts, "failure": failure or facts.get("failure", "")})


def _tuples(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}


def _ask(*words: str) -> tuple[dict[str, Any], str]:
    """(the facts of the process, what went wrong with it)."""
    environment = environment_of_program()
    for name in ("OMPI_MCA_btl",):  # a setting of the start of MPI, not of the launcher
        if name in os.environ:
            environment[name] = os.environ[name]
    command = [*python("mpitrain.tools.doctor.packages"), *words]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_LIMIT_S:g} s"
    except OSError as error:
        return {}, str(error)
    last = ended.stdout.rstrip().rpartition("\n")[2]
    with suppress(ValueError):
        if isinstance(facts := json.loads(last), dict):
            return facts, ""
    if ended.returncode < 0:
        return {}, f"the process was ended by {signal.Signals(-ended.returncode).name}"
    said = ended.stderr.rstrip().rpartition("\n")[2]
    return {}, f"the process ended with exit code {ended.returncode}: {said}"


def _gpu() -> Gpu:
    files = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")))
    driver = ""
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        driver = next((word for word in words if word[0].isdigit() and "." in word), "")
    try:
        import torch
    except Exception as error:
        return Gpu(driver=driver, files=files, failure=f"import torch: {type(error).__name__}: {error}")
    devices, wrong = [], []
    for index in range(torch.cuda.device_count()):
        try:
            its = torch.cuda.get_device_properties(index)
            devices.append(f"{its.name}, {its.total_memory / 1e9:.0f} GB, sm_{its.major}{its.minor}")
            ones = torch.ones(64, 64, device=torch.device("cuda", index))
            if (ones @ ones).sum().item() != 64**3:
                wrong.append(f"GPU {index} ({its.name}): a product of ones has a wrong sum")
        except Exception as error:
            wrong.append(f"GPU {index}: {str(error).partition(chr(10))[0]}")
    from collectives.transports.gpu import binding

    nccl = no_nccl = ""
    try:
        nccl = binding.version_text(binding.load().version())
    except Exception as error:
        no_nccl = str(error)
    return Gpu(
        str(torch.__version__),
        torch.version.cuda or "",
        driver,
        files,
        tuple(devices),
        tuple(wrong),
        nccl,
        no_nccl,
    )


def _hdf5() -> Hdf5:
    import numpy as np

    import ckpt
    import collectives
    from ckpt.saving import mpio

    comm = collectives.world()
    reason = mpio.mpio_error(comm.mpi) or ""
    version, library = mpio.versions()
    from collectives.commands.installation import mpi_facts

    save_failure = ""
    if not reason:
        folder = Path(tempfile.mkdtemp(prefix="mpitrain-doctor-"))
        try:
            values = np.arange(1000, dtype=np.float32)
            ckpt.save(folder / "test", {"values": values}, comm=comm, driver="mpio")
            back = np.zeros_like(values)
            ckpt.load(folder / "test", {"values": back}, comm=comm)
            if not np.array_equal(values, back):
                save_failure = "the values that were read differ from those saved"
        except Exception as error:
            save_failure = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return Hdf5(version, library, not reason, reason, mpi_facts().paths, save_failure)


def _need(settings: str, num_ranks: str, num_nodes: str) -> Need:
    from mpitrain.job.config import from_toml
    from mpitrain.tools.plan.memory.prediction import predict

    try:
        its = predict(from_toml(Path(settings)), int(num_ranks), int(num_nodes))
        return Need(its.shared, sum(its.node.values()))
    except (ValueError, OSError) as error:
        return Need(failure=str(error))


if __name__ == "__main__":
    end_with_parent()  # the process that asks may have given up
    what, *words = sys.argv[1:]
    kinds: dict[str, Any] = {"gpu": _gpu, "hdf5": _hdf5, "need": _need}
    facts = kinds[what](*words)
    print(json.dumps(facts._asdict()), flush=True)
