"""What the MPI library does as it is launched: another MPI's mpirun, and settings that it reads at its start."""

import sys
from collections.abc import Mapping

import pytest
from launching import ROOT, is_open_mpi, launch, run

from collectives.transports.segments import EAGER_BYTES

pytestmark = pytest.mark.rest

MPICH = ROOT / ".venv/mpich/bin/mpirun"

# What Open MPI itself says of the setting, by MPI's interface for tools, which mpi4py does not wrap.
EAGER_LIMIT = """
import ctypes, collectives
collectives.world()
(library,) = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line}
tools = ctypes.CDLL(library)
level, index, count, handle, value = (*(ctypes.c_int() for _ in range(3)), ctypes.c_void_p(), ctypes.c_size_t())
assert tools.MPI_T_init_thread(0, ctypes.byref(level)) == 0
assert tools.MPI_T_cvar_get_index(b"btl_tcp_eager_limit", ctypes.byref(index)) == 0
assert tools.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
assert tools.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
print("eager limit", value.value)
"""


def test_another_mpi_s_mpirun_is_refused() -> None:
    if not is_open_mpi() or not MPICH.exists():
        pytest.skip("needs PyPI's MPICH beside Open MPI")
    script = "import collectives\ncomm = collectives.world()\nprint('a world of', comm.size)"
    result = run([MPICH, "-np", "2", sys.executable, "-c", script], cwd=ROOT)
    assert result.returncode != 0 and "a world of" not in result.stdout, str(result)
    assert (
        "RuntimeError: an mpirun of MPICH's family has started 2 ranks (PMI_SIZE=2), but MPI in this" in result.stderr
    ), str(result)


def test_a_process_of_torchrun_is_refused() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    result = run([sys.executable, "-c", "import collectives; collectives.world()"], cwd=ROOT, env=env)
    assert result.returncode == 1, str(result)
    assert "RuntimeError: torchrun has started 2 processes" in result.stderr, str(result)
    assert "mpirun -np 2 python -c 'import collectives; collectives.world()'. " in result.stderr, str(result)


@pytest.mark.parametrize(
    ("first", "env", "limit"),
    [
        ("", {}, EAGER_BYTES),
        ("", {"OMPI_MCA_btl_tcp_eager_limit": "70000"}, 70_000),  # the user's choice
        ("from mpi4py import MPI", {}, None),  # too late
    ],
)
def test_open_mpi_sends_a_whole_segment_at_once_over_tcp(first: str, env: Mapping[str, str], limit: int | None) -> None:
    if not is_open_mpi():
        pytest.skip("a setting of Open MPI")
    result = launch(1, "-c", first + EAGER_LIMIT, cwd=ROOT, env=env)
    assert result.returncode == 0, str(result)
    (shown,) = [int(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("eager limit")]
    assert shown == limit if limit is not None else shown < EAGER_BYTES, str(result)


def test_pypi_s_open_mpi_says_nothing_of_a_way_to_prove_itself_that_it_lacks() -> None:
    """Slurm's srun gives its ranks this variable. Once `world()` starts MPI, and once mpi4py does."""
    if not is_open_mpi():
        pytest.skip("a setting of PMIx")
    variable = (
        "import os; os.environ['PMIX_SECURITY_MODE'] = 'munge,native'\n"  # not for mpirun, which has no munge either
    )
    for first in ("", "from mpi4py import MPI\n"):
        script = f"{variable}import collectives\n{first}print('size', collectives.world().size)"
        result = launch(2, "-c", script, cwd=ROOT)
        assert result.returncode == 0 and result.stdout.count("size 2") == 2, str(result)
        assert "munge" not in result.stdout + result.stderr, str(result)
