"""What a step frees stays with the process: the next one pays for no fresh pages."""

import os
import subprocess
import sys

import pytest

STEPS = """
import resource
import torch
from mpitrain.torch_glue.heap import keep_freed_memory

torch.set_num_threads(1)
print(keep_freed_memory())
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [torch.ones(1 << 20) for _ in range(20)]  # 80 MB
    del taken
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def steps(**variables: str) -> tuple[str, list[int]]:
    """What `keep_freed_memory` returned, and the page faults of five steps."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    answer = subprocess.run(command, env=known | variables, capture_output=True, text=True, timeout=60, check=True)
    kept, *faults = answer.stdout.split()
    return kept, [int(each) for each in faults]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_step_takes_the_pages_of_the_one_before() -> None:
    kept, faults = steps()
    assert kept == "True"
    assert faults[0] > 10_000, "80 MB are 20,000 pages of 4 KiB"
    assert max(faults[3:]) < 100, "what came before has grown the heap to its size"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_the_user_has_said_of_the_heap_stands() -> None:
    kept, faults = steps(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert min(faults) > 10_000
