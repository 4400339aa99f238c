"""Jitted collectives under the command that users type: a plain mpirun, which may bind each rank to one core."""

import os
import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, Result, is_open_mpi, job_environment, run

pytestmark = pytest.mark.rest

pytest.importorskip("jax", reason="JAX is not installed (pip install 'mpitrain[jax]')")

if (os.cpu_count() or 1) < 2:
    pytest.skip("a plain mpirun starts no more ranks than there are cores", allow_module_level=True)

# One core makes one thread of JAX. Open MPI binds so where each of two ranks has a core; here it is so under every MPI.
ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
jnp.ones(3).block_until_ready()  # JAX has started, and knows its threads, before collectives.jax is imported
import collectives
from collectives import jax as cj
comm = collectives.world()
"""


def plain(script: str, *, timeout_s: float) -> Result:
    """`mpirun -np 2 python -c script` without any setting of this project."""
    mpirun, _ = job_environment(2)
    options = ["--allow-run-as-root"] if is_open_mpi() else []
    return run(
        [mpirun, *options, "-np", "2", sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT)},
        cwd=Path("/"),
        timeout_s=timeout_s,
    )


def test_on_one_core() -> None:
    """JAX copies arguments of 30,000 elements and more on a thread of its own: operands that are not ready when the call begins."""
    script = (
        ON_ONE_CORE
        + """
f = jax.jit(lambda a: cj.all_reduce(a, comm))
for size in (10, 29_000, 300_000, 3_000_000):
    y = f(np.ones(size, "f4"))
    comm.barrier()  # begins after it, on a core that both share
    assert (np.asarray(y) == 2).all() and y.shape == (size,)
part = jax.jit(lambda a: cj.reduce_scatter(cj.all_gather(a, comm) * 2, comm))(np.ones(200_000, "f4"))
assert (np.asarray(part) == 4).all()
grad = jax.jit(jax.grad(lambda a: (cj.all_reduce(a, comm, "avg") ** 2).sum()))(np.ones(300_000, "f4"))
assert (np.asarray(grad) == 2).all()
print("right on rank", comm.rank, flush=True)
"""
    )
    result = plain(script, timeout_s=60)
    assert result.returncode == 0 and "right on rank 0" in result.stdout and "right on rank 1" in result.stdout, str(
        result
    )


def test_a_hang_inside_jax_before_an_operation_begins_ends_at_the_deadline() -> None:
    """A callback of the program never ends, on whatever thread JAX calls it; nobody enters a collective."""
    script = (
        ON_ONE_CORE
        + """
import threading, time
from jax.experimental import io_callback
f = jax.jit(lambda a: cj.all_reduce(a, comm))
f(np.ones(10, "f4")).block_until_ready()
collectives.set_deadline(2)
def spin(x):  # longer than the deadline, which ends no computation
    begin = time.monotonic()
    while time.monotonic() < begin + 4:
        pass
    return np.float32(1)
assert jax.jit(lambda a: io_callback(spin, a, a))(np.float32(0)) == 1
print("computed", flush=True)
def stuck(x):
    threading.Event().wait()
y = jax.jit(lambda a: cj.all_reduce(io_callback(stuck, a, a), comm))(np.ones(300_000, "f4"))
print(np.asarray(y))
"""
    )
    result = plain(script, timeout_s=60)
    assert result.returncode == 124 and result.stdout.count("computed") == 2, str(result)
    # Both ranks come to the deadline. The one that is first ends the job.
    said = r"s in JAX \(rank [01]\): #0 standing still before an operation begins; the deadline is 2 s"
    assert re.search(said, result.stderr), str(result)
    assert result.stderr.count("in no operation, main thread at") in (1, 2), str(result)
    assert "perhaps a callback of the program waits" in result.stderr, str(result)


def test_a_long_computation_is_no_hang() -> None:
    """Its collectives are short. What waits for its end may wait longer than the deadline."""
    script = (
        ON_ONE_CORE
        + """
import time
f = jax.jit(lambda a, n: jax.lax.fori_loop(0, n, lambda _, x: cj.all_reduce(x, comm, "avg"), a))
x = np.ones(300_000, "f4")
f(x, 1).block_until_ready()
begin = time.monotonic()
f(x, 20).block_until_ready()
num = comm.broadcast_object(int(20 * 6 / (time.monotonic() - begin)))  # takes six seconds
comm.barrier()
collectives.set_deadline(2)
y = f(x, num)  # returns on some rank, as JAX copies x first
comm.barrier()
assert (np.asarray(y) == 1).all()
print("through", flush=True)
"""
    )
    result = plain(script, timeout_s=60)
    assert result.returncode == 0 and result.stdout.count("through") == 2, str(result)
