"""The mpirun of one MPI around the library of another."""

import sys

import pytest
from launching import ROOT, is_open_mpi, run

MPICH = ROOT / ".venv/mpich/bin/mpirun"


def test_another_mpi_s_mpirun_is_refused() -> None:
    if not is_open_mpi() or not MPICH.exists():
        pytest.skip("needs PyPI's MPICH beside Open MPI")
    script = "import collectives\ncomm = collectives.world()\nprint('a world of', comm.size)"
    result = run([MPICH, "-np", "2", sys.executable, "-c", script], cwd=ROOT)
    assert result.returncode != 0 and "a world of" not in result.stdout, str(result)
    assert (
        "RuntimeError: an mpirun of MPICH's family has started 2 ranks (PMI_SIZE=2), but MPI in this" in result.stderr
    ), str(result)
