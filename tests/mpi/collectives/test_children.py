"""A program that a rank starts and that calls `collectives.world()`: it is no rank, and the job of its parent goes on."""

import subprocess
import sys

import numpy as np
import pytest

from collectives import Communicator

pytestmark = pytest.mark.rest

PROGRAM = """
import multiprocessing, os, collectives
for is_spawned in (True, False):  # as multiprocessing has it while it imports the main program
    multiprocessing.current_process()._inheriting = is_spawned
    try:
        collectives.world()
    except RuntimeError as error:
        print(error)
for name in os.environ.keys() - collectives.environment_of_program().keys():
    del os.environ[name]
print("a world of", collectives.world().size)
"""


@pytest.mark.ranks(2)
def test_a_program_that_a_rank_starts_is_refused_or_a_job_of_its_own(comm: Communicator) -> None:
    if comm.rank == 1:
        child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
        unguarded, refused, alone = child.stdout.splitlines()
        assert unguarded.startswith("this is a spawned process") and "if __name__ ==" in unguarded, child
        assert refused.startswith("this program (process ") and "was started by a rank" in refused, child
        assert (alone, child.returncode) == ("a world of 1", 0), child
    assert comm.all_reduce(np.ones(3))[0] == comm.size
