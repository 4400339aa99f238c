"""Programs that a rank starts and that call `collectives.world()`: they are no ranks, and the job of their parent goes on."""

import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

import collectives
from collectives import Communicator

PROGRAM = "import collectives; print('a world of', collectives.world().size)"


def refusal() -> str:
    """In a spawned process: why it has no world."""
    try:
        return f"a world of {collectives.world().size}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.ranks(2)
def test_a_program_that_a_rank_starts_is_refused(comm: Communicator) -> None:
    if comm.rank == 0:
        environments = (None, collectives.environment_of_program())
        children = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for env in environments
        ]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert "was started by a rank" in pool.apply(refusal)
        (_, refused), (told, _) = [child.communicate(timeout=60) for child in children]
        assert "RuntimeError: this program" in refused and "was started by a rank" in refused
        assert told == "a world of 1\n"
        assert [child.returncode for child in children] == [1, 0]
    assert comm.all_reduce(np.ones(3))[0] == comm.size
