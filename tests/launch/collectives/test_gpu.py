"""Jobs whose NCCL is a model (tests/helpers/device_model.py): how GPUs are connected and how NCCL ends, in real processes."""

import re
from collections.abc import Sequence

import pytest
from extent import extent
from launching import ROOT, Result, is_open_mpi, launch, without_names

HEADER = """
import logging, os, sys, time
import numpy as np, collectives
comm = collectives.world()
from device_model import ModelBinding, ModelCommunicator, ModelCupyKernels
from gpu_rig import INDEX, OnGpu
from mpi4py import MPI
from collectives.diagnosis import job
from collectives.transports.gpu import cuda
from collectives.transports.gpu import device
from collectives.transports.gpu import watch
from collectives.transports.gpu.nccl import connect

def say(what):
    # in one piece: other threads say something too
    sys.stderr.write(f"rank {comm.rank}: {what}{' after MPI' if MPI.Is_finalized() else ''}\\n")

class Told(ModelCommunicator):
    def destroy(self):
        super().destroy()
        say("destroyed")
    def abort(self):
        super().abort()
        say("aborted")
    def __del__(self):
        if not self.ended:
            os.write(2, b"left to the garbage collector\\n")

class Binding(ModelBinding):
    def communicator(self, size, unique_id, rank):
        self.communicators.append(Told(self, job.all_ranks(), size, rank))
        return self.communicators[-1]

model, kernels = Binding(INDEX), ModelCupyKernels(INDEX)
device.connect = lambda mpi, index: connect(mpi, index, model)
device.kernels_of = lambda index: kernels
cuda.agree = lambda mpi, make: cuda.Support(False, "as if")
over, watch.over = watch.over, lambda queue: None  # a thread; the model is for one
stream = model.stream()

def full(value):
    return OnGpu(np.full(4, value, np.float32), stream)
"""


def job(script: str, num_ranks: int = 2, options: Sequence[str] = (), **env: str) -> Result:
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers", **env}
    return launch(num_ranks, "-c", HEADER + script, options=options, cwd=ROOT, env=env, timeout_s=60)


def said(result: Result) -> list[str]:
    return sorted(re.findall(r"rank \d: (?:destroyed|aborted).*|left to the .*|SAW.*", result.stderr))


@pytest.mark.rest
def test_a_rank_that_never_connects_is_named() -> None:
    """The others wait for it in a step that the flight record lists, so that the deadline ends it."""
    script = """
if comm.rank == 0:
    time.sleep(60)
comm.all_reduce(full(1))
"""
    result = job(script, MPITRAIN_DEADLINE_S="1")
    assert result.returncode == 124, str(result)
    assert "rank 1 has waited" in without_names(result.stderr), str(result)
    assert re.search(r"world \(ranks 0, 1\): #1 connecting GPUs", result.stderr), str(result)
    assert "missing: rank 0" in result.stderr, str(result)


@pytest.mark.rest
@pytest.mark.parametrize(
    "end", ["pass", "comm.free()", *extent([], ["sys.exit()", "MPI.Finalize()", "raise SystemExit(0)"])]
)
def test_all_ranks_destroy_their_communicators_before_mpi_ends(end: str) -> None:
    script = f"""
other = collectives.Communicator(comm.mpi.Dup())
for each in (comm, other):
    x = full(comm.rank + 1)
    each.all_reduce(x)
    model.drain()
    assert x.values.tolist() == [3] * 4
time.sleep(0.5 * comm.rank)  # whoever comes first waits
{end}
"""
    result = job(script)
    assert result.returncode == 0, str(result)
    assert said(result) == [f"rank {rank}: destroyed" for rank in (0, 0, 1, 1)], str(result)


def test_an_error_on_all_ranks_aborts() -> None:
    """Each by itself: nobody waits for NCCL's kernels, which may never end."""
    script = """
comm.all_reduce(full(1))
model.patience = 10**9  # NCCL's kernel waits for ever
with comm.together("reading"):
    if comm.rank == 1:
        raise ValueError("no such file")
"""
    result = job(script)
    assert result.returncode == 1, str(result)
    assert "ValueError: reading: no such file" in result.stderr, str(result)
    assert said(result) == ["rank 0: aborted", "rank 1: aborted"], str(result)


@pytest.mark.parametrize("error", ["1 / 0", *extent([], ["threading.Thread(target=lambda: 1 / 0).start()"])])
def test_a_rank_that_ends_the_job_aborts_its_own(error: str) -> None:
    """Before MPI_Abort ends all ranks. Nothing is left to Python's end, where NCCL would wait for the other ranks."""
    script = f"""
import threading
comm.all_reduce(full(1))
model.drain()
comm.barrier()
if comm.rank == 1:
    {error}
time.sleep(30)
"""
    result = job(script)
    assert result.returncode != 0, str(result)
    assert said(result) == ["rank 1: aborted"], str(result)
    assert result.seconds < 25, str(result)


@pytest.mark.rest
def test_an_abort_that_hangs_does_not_keep_the_job() -> None:
    result = job("comm.all_reduce(full(1))\nTold.abort = lambda self: time.sleep(60)\n1 / 0")
    assert result.returncode != 0, str(result)
    assert result.seconds < 30, str(result)


@pytest.mark.parametrize("broken", ["comm.rank == 1", *extent([], ["True"])])
def test_a_fault_noticed_at_the_end_is_said_and_all_ranks_abort(broken: str) -> None:
    script = f"""
other = collectives.Communicator(comm.mpi.Dup())
for each in (comm, other):
    each.all_reduce(full(1))
model.drain()
if {broken}:
    model.communicators[0].error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
"""
    result = job(script)
    assert result.returncode == 0, str(result)
    assert said(result) == [f"rank {rank}: aborted" for rank in (0, 0, 1, 1)], str(result)
    assert "NCCL_ERROR_REMOTE_ERROR" in result.stderr, str(result)


def test_an_error_that_a_rank_has_caught_keeps_all_from_waiting_for_it() -> None:
    """Its communicator is gone: the others must not destroy theirs, which waits for all ranks."""
    script = """
comm.all_reduce(full(1))
model.drain()
comm.barrier()
if comm.rank == 1:
    comm._devices._nccl.abort("as an operation does that fails")
"""
    result = job(script)
    assert result.returncode == 0, str(result)
    assert said(result) == ["rank 0: aborted", "rank 1: aborted"], str(result)


@pytest.mark.rest
def test_mpi_without_threads() -> None:
    """Ranks that cannot talk to each other meanwhile still end together."""
    script = """
comm.all_reduce(full(1))
model.drain()
time.sleep(0.5 * comm.rank)
"""
    result = launch(
        2,
        "-c",
        "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n" + HEADER + script,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers"},
        timeout_s=60,
    )
    assert result.returncode == 0, str(result)
    assert said(result) == ["rank 0: destroyed", "rank 1: destroyed"], str(result)


@pytest.mark.rest
@pytest.mark.skipif(not is_open_mpi(), reason="ULFM is a part of Open MPI")
def test_after_a_loss_the_communicators_are_aborted_and_made_again() -> None:
    """The host waits for a stream whose kernel waits for the lost rank, in no call of this library: an abort lets it go on."""
    script = """
import signal
from collectives import recovery
from collectives.transports.gpu.nccl_queue import NcclError

recovery.survive_losses()
comm.all_reduce(full(comm.rank))
model.drain()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
work = comm.all_reduce(full(1), async_op=True)
(old,) = model.communicators
end = time.monotonic() + 10
while not old.ended:
    assert time.monotonic() < end, "the kernel was not aborted"
    time.sleep(0.01)
assert recovery.ranks_were_lost()
for call in (work.wait, lambda: comm.all_reduce(full(1))):
    try:
        call()
    except (NcclError, MPI.Exception) as error:
        say(f"SAW {type(error).__name__}")
del work, call
comm = recovery.recover()
for _ in range(2):
    x = full(comm.rank + 1)
    comm.all_reduce(x)
    model.drain()
    assert x.values.tolist() == [3] * 4
say(f"SAW {len(model.communicators)} communicators, {model.communicators[1].calls}")
assert recovery.all_are_done()
"""
    result = job(script, 3, options=["--with-ft", "ulfm"])
    assert result.returncode == 0, str(result)
    assert said(result) == [
        *["SAW 2 communicators, ['allReduce', 'allReduce']"] * 2,
        *["SAW NcclError"] * 4,
        *["rank 0: aborted", "rank 0: destroyed"],
        *["rank 1: destroyed", "rank 2: aborted"],
    ], str(result)


def test_a_graph_that_lives_to_the_end_keeps_its_communicator() -> None:
    """NCCL would wait for the end of the graph, for ever."""
    script = """
comm.all_reduce(full(1))
model.begin_capture(stream)
comm.all_reduce(full(1))
graph = model.end_capture()
other = collectives.Communicator(comm.mpi.Dup())
other.all_reduce(full(1))
"""
    result = job(script)
    assert result.returncode == 0, str(result)
    assert said(result) == ["rank 0: destroyed", "rank 1: destroyed"], str(result)


@pytest.mark.rest
def test_a_watch_that_sees_an_error_ends_the_job() -> None:
    """The thread itself."""
    script = """
watch.over, watch._GRACE_S = over, 0.5
comm.all_reduce(full(1))
model.drain()
model.communicators[0].error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
while not model.communicators[0].ended:
    time.sleep(0.01)
raise RuntimeError("what comes of the abort")  # is not what the job ends with
"""
    result = job(script)
    assert result.returncode == 124, str(result)
    assert "NCCL failed, and the program waits on: NCCL_ERROR_REMOTE_ERROR" in result.stderr, str(result)
    assert "what comes of the abort" not in result.stderr, str(result)
    assert result.seconds < 25, str(result)
