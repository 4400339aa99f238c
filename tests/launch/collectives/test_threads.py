"""Threads that use one communicator at once end the job with one error each, and leave nobody waiting."""

import pytest
from launching import ROOT, launch

pytestmark = pytest.mark.rest

HEADER = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np, collectives
comm = collectives.world()
def work(number):
    for _ in range(200):
        comm.all_reduce(np.ones(1000 * number + 100))
"""
WAYS = {
    "threads": "threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]\n"
    "for each in threads: each.start()\nfor each in threads: each.join()",
    "a pool, which keeps the errors": "with ThreadPoolExecutor(4) as pool:\n    list(pool.map(work, range(4)))",
}


@pytest.mark.parametrize("way", WAYS)
def test_four_threads_on_one_communicator(way: str) -> None:
    result = launch(
        3, "-c", HEADER + WAYS[way] + "\nprint('through')", cwd=ROOT, env={"MPITRAIN_DEADLINE_S": "40"}, timeout_s=60
    )
    assert result.returncode not in (0, 124) and "through" not in result.stdout, str(result)
    assert "RuntimeError: all_reduce on world (ranks 0-2), by thread T" in result.stderr, str(result)
    assert "expected one thread at a time" in result.stderr and result.seconds < 25, str(result)
