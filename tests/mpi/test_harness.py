"""The fixtures of this folder. That its conftest catches failures and hangs is tested in tests/launch/test_harness.py."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI


def test_comm_is_the_whole_job_on_a_communicator_of_its_own(comm: Any) -> None:
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert MPI.Comm.Compare(comm.mpi, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_shared_tmp_is_one_empty_folder(comm: Any, shared_tmp: Path) -> None:
    assert list(shared_tmp.iterdir()) == []
    comm.barrier()
    (shared_tmp / f"from-{comm.rank}").touch()
    comm.barrier()
    assert len(list(shared_tmp.iterdir())) == comm.size


def test_each_test_has_a_shared_tmp_of_its_own(shared_tmp: Path) -> None:
    assert list(shared_tmp.iterdir()) == []


@given(st.integers(), st.text())
def test_property_tests_draw_the_same_on_all_ranks(number: int, text: str) -> None:
    assert MPI.COMM_WORLD.bcast((number, text)) == (number, text)


def test_a_skip_on_all_ranks_is_a_skip() -> None:
    pytest.skip("to see one skip counted once in the report")
