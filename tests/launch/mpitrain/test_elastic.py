"""Real jobs whose ranks are killed, stopped, or end by an error: the others go on in place, and the run ends as an undisturbed one."""

import csv
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from launching import ROOT, is_open_mpi, job_environment, launch, rank_of, run, session_processes
from main_job import losses

import ckpt
from benchmarks.chaos.disk import small_disk
from mpitrain.job.elastic.copies.files import files_of, remove_copies
from mpitrain.job.elastic.lease import read_lease
from mpitrain.tools.bench.jobs.job import BenchJob

STEPS = 60
SETTINGS = (
    *("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32"),
    *("--train.steps", str(STEPS), "--train.batch", "8", "--train.eval-every", "20", "--train.eval-batches", "2"),
    *("--train.sample-bytes", "0", "--optim.warmup-steps", "10", "--checkpoint.every", "0", "--log.every", "5"),
)
ELASTIC = ("--train.elastic", "true", "--train.copy-every", "5")
MPICH = ROOT / ".venv/mpich"

needs_open_mpi = pytest.mark.skipif(not is_open_mpi(), reason="ULFM is a part of Open MPI")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run on one rank."""
    folder = tmp_path_factory.mktemp("elastic") / "alone"
    result = launch(1, "-m", "mpitrain", "--run", str(folder), "--data.path", str(corpus), *SETTINGS, timeout_s=60)
    assert result.returncode == 0, str(result)
    return folder


Start = Callable[..., BenchJob]


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Start]:
    """Starts an elastic run on so many ranks. All its processes and copies are removed after the test."""
    jobs = []

    def begin(num_ranks: int, *words: str, **env: str) -> BenchJob:
        mpirun, settings = job_environment(num_ranks)
        command = [mpirun, "--with-ft", "ulfm", "-np", str(num_ranks)]
        settings_of_run = ["--data.path", str(corpus), *SETTINGS, *ELASTIC, *words]
        job = BenchJob(command, {**settings, **env}, settings_of_run, tmp_path / "run")
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        job.kill()
    if (lease := read_lease(tmp_path / "run")) is not None:
        remove_copies(lease.run)


def kill(job: BenchJob, *ranks: int, by: int = signal.SIGKILL) -> None:
    """Send a signal to ranks, which are those of the start of the job."""
    processes = job.ranks()
    for rank in ranks:
        os.kill(processes[rank], by)


def reaches(job: BenchJob, step: int) -> None:
    assert job.wait_for_step(step, 60), f"step {step} was not reached\n{job.output}"


def goes_on(job: BenchJob, num_losses: int) -> None:
    """Wait until the run has done a step after that many losses."""
    assert job.wait_until(lambda: len(job.events("restore")) >= num_losses, 30), f"no recovery\n{job.output}"


def copies(run: Path) -> list[str]:
    lease = read_lease(run)
    assert lease is not None
    return [file.name for file in files_of(lease.run)]


def assert_ended_as(job: BenchJob, undisturbed: Path) -> None:
    code = job.end(60)
    assert code == 0, f"exit code {code}\n{job.output}"
    # Relative: other numbers of ranks add in another order.
    np.testing.assert_allclose(losses(job.run), losses(undisturbed), rtol=1e-5, err_msg=job.output)
    assert len(losses(job.run)) == STEPS
    assert copies(job.run) == [] and job.left() == []
    assert not (job.run / ".lock").exists()


@pytest.mark.rest
@needs_open_mpi
def test_ranks_are_killed_one_after_another_until_too_few_are_left(start: Start, undisturbed: Path) -> None:
    """4 ranks, then 3, of which each has another number of rows, then 2 without rank 0. With one rank the job ends; its copies stay.

    The same command goes on from the copies, and loses two ranks at once.
    """
    seen = ("--train.min-ranks", "2", "--log.sinks", "csv", "tensorboard")
    job = start(4, *seen)
    for number, (step, rank, by) in enumerate(((8, 1, signal.SIGKILL), (16, 0, signal.SIGTERM)), 1):
        reaches(job, step)
        kill(job, rank, by=by)
        goes_on(job, number)
    reaches(job, 27)
    kill(job, 3)
    code = job.end(30)
    assert code == 1, f"exit code {code}\n{job.output}"
    assert re.search(
        r"mpitrain: error: lost rank 1 on \S+ \(process \d+\): 1 rank has work, and the smallest number that goes on is 2 ",
        job.output,
    ), job.output
    assert job.left() == [] and len(copies(job.run)) >= 2
    assert [event["ranks"] for event in job.events("shrink")] == [3, 2]
    failures = job.events("failure")
    assert [event["rank"] for event in failures] == [1, 0, None]
    for event, what in zip(failures, ("has died", "has ended at SIGTERM", "1 rank has work"), strict=True):
        assert what in (event["problem"] or ""), f"{failures}\n{job.output}"
    assert all(0 < event["cost_s"] < 15 for event in job.events("restore"))
    for event, step in zip(job.events("restore"), (8, 16), strict=True):
        assert step - 5 < event["step"] <= step + 20, event

    again = start(4, *seen)
    reaches(again, 36)
    begins = re.search(r"goes on from the copies of step (\d+) in node memory", again.output)
    assert begins and int(begins[1]) in (25, 30, 35), again.output
    kill(again, 0, 2)
    assert_ended_as(again, undisturbed)
    assert len(again.events("failure")) == 5, again.output
    with (again.run / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
    steps = [json.loads(line)["step"] for line in (again.run / "ranks.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and len(steps) > STEPS / 2  # a loss takes the last line with it
    assert again.events("sink") == []
    assert again.events("shrink")[-1]["ranks"] == 2


@pytest.mark.rest
@needs_open_mpi
def test_a_run_on_documents_goes_on_with_the_same_batches(start: Start, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"all work and no play makes {n} dull documents. " * (n % 5 + 1)}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["--data.path", str(tmp_path / "a.jsonl")]
    alone = launch(1, "-m", "mpitrain", "--run", str(tmp_path / "alone"), *SETTINGS, *words, timeout_s=60)
    assert alone.returncode == 0, str(alone)
    job = start(3, *words)
    reaches(job, 18)
    kill(job, 1)
    assert_ended_as(job, tmp_path / "alone")
    assert "2 ranks go on from step" in job.output


@pytest.mark.rest
@needs_open_mpi
def test_tensor_ranks_go_on_with_an_idle_rank_and_without_a_stopped_one(start: Start, undisturbed: Path) -> None:
    job = start(4, "--parallel.tensor", "2", MPITRAIN_DEADLINE_S="3")
    reaches(job, 8)
    kill(job, 0)
    goes_on(job, 1)
    assert "2 ranks go on, 1 without work, from step" in job.output
    (event,) = job.events("shrink")
    assert (event["ranks"], event["idle"], event["layout"]) == (2, 1, {"tp": 2})
    reaches(job, 20)
    stopped = job.ranks()[2]
    os.kill(stopped, signal.SIGSTOP)
    since = time.monotonic()
    goes_on(job, 2)
    assert time.monotonic() - since < 3 + 10, job.output
    assert "The job goes on without rank 1 on" in job.output and "no answer yet" in job.output, job.output
    assert_ended_as(job, undisturbed)
    assert [(event["ranks"], event["idle"]) for event in job.events("shrink")] == [(2, 1), (2, 0)]
    assert [event["rank"] for event in job.events("failure")] == [0, 1]
    assert job.events("failure")[1]["pid"] == stopped


@pytest.mark.rest
@needs_open_mpi
def test_a_rank_that_was_idle_from_the_start_gets_work(start: Start, undisturbed: Path) -> None:
    job = start(3, "--parallel.tensor", "2")
    reaches(job, 8)
    kill(job, 0)
    goes_on(job, 1)
    assert "1 more without work" in job.output and "2 ranks go on from step" in job.output
    assert_ended_as(job, undisturbed)


@pytest.mark.rest
@needs_open_mpi
def test_a_copy_is_left_out_between_outer_steps_and_returns(start: Start) -> None:
    """Three copies train apart, then two. The same command on three ranks goes on with three."""
    settings = {"copies": 3, "local-steps": 7, "exact-steps": 3}
    words = [word for name, value in settings.items() for word in (f"--parallel.{name}", str(value))]
    words += ["--train.batch", "6", "--train.steps", "40"]
    job = start(3, *words)
    reaches(job, 8)
    kill(job, 1)
    goes_on(job, 1)
    assert job.events("shrink")[0]["layout"] == {"dp_replicate": 2}
    reaches(job, 18)
    job.kill()
    assert job.wait_until_left_alone(10)
    again = start(3, *words)
    code = again.end(60)
    assert code == 0 and len(losses(again.run)) == 40, f"exit code {code}\n{again.output}"
    assert "it was saved by 2 copies in local steps, now 3" in again.output, again.output
    assert np.mean(losses(again.run)[-5:]) < losses(again.run)[0] - 1, "it learns"


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder for the node memory of a job, so that a test finds the copies of its own job."""
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


LOOP = """
import os, sys, torch, mpitrain
from mpitrain import elastic

def build(comm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    mpitrain.fully_shard(model, comm)
    state = elastic.State(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state.comm = comm
    return state

def train(state):
    sys.stdout.write(f"begins at {state.step} of {state.comm.size}\\n")  # in one piece
    sys.stdout.flush()
    while state.step < 30:
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(state.step))
        loss = (state.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        if state.comm.size == 3 and state.comm.rank == 1 and state.step == 17:
            raise KeyError("its own")
        if state.comm.size == 2 and state.comm.rank == 0 and state.step == 23:
            os.kill(os.getpid(), 9)
    whole = mpitrain.full_state_dict(state.model)
    if state.comm.rank == 0:
        print("sum", sum(float(value.double().sum()) for value in whole.values()), flush=True)

elastic.run(train, build, every=5)
"""


def sums(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("sum")]


@pytest.mark.rest
@needs_open_mpi
def test_a_loop_goes_on_after_an_exception_of_one_rank_and_a_death(room: Path) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPITRAIN_SHM_DIR": str(room)}
    result = launch(3, "-c", LOOP, options=["--with-ft", "ulfm"], env=env, timeout_s=60)
    assert result.returncode == 0, str(result)
    assert result.stderr.count("ends by an uncaught KeyError") == 1 and "KeyError: 'its own'" in result.stderr, str(
        result
    )
    assert "has ended by an uncaught KeyError. The other ranks go on." in result.stderr, str(result)
    assert re.search(r"lost rank 1 on \S+ \(process \d+\): 2 ranks go on from step 15", result.stdout), str(result)
    assert re.search(r"lost rank 0 on \S+ \(process \d+\): 1 rank goes on from step 20", result.stdout), str(result)
    assert sorted(re.findall(r"begins at .*", result.stdout.replace("\r", ""))) == sorted(
        ["begins at 0 of 3"] * 3 + ["begins at 15 of 2"] * 2 + ["begins at 20 of 1"]
    )
    alone = launch(1, "-c", LOOP, env=env)
    assert "elastic.run: a lost rank ends this job, because the job was started without ULFM" in alone.stderr, str(
        alone
    )
    # Each rank has the same rows, and the mean over the ranks adds them in another order.
    assert sums(result.stdout) == pytest.approx(sums(alone.stdout), rel=1e-5) and len(sums(alone.stdout)) == 1
    assert list(room.iterdir()) == []


BAD_ROW = """
import os
import numpy as np
import collectives
from mpitrain.job.elastic.survive import RankProgress, survive

step = begun = 0

def attempt(comm, layout, recovered):
    global step, begun
    while True:
        begun += 1
        comm.all_reduce(np.ones(1))
        if step == 5 and comm.rank == 0:
            raise ValueError("a bad row")
        step = min(step + 1, 5)

survive(attempt, collectives.world(), axes={}, progress=lambda: RankProgress(step, begun))
"""


@pytest.mark.rest
@needs_open_mpi
def test_an_error_that_comes_back_at_the_same_step_does_not_take_all_ranks() -> None:
    result = launch(4, "-c", BAD_ROW, options=["--with-ft", "ulfm"], env={"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert result.returncode != 0, str(result)
    assert result.stderr.count("ends by an uncaught ValueError") == 3, str(result)
    assert (
        "NoProgressError: lost rank 0 on" in result.stderr and "3 losses in a row without a new step" in result.stderr
    ), str(result)


def read_head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(8)


@pytest.mark.rest
@needs_open_mpi
def test_the_example_goes_on_after_a_kill(room: Path) -> None:
    """The rank dies after the second copy of the state. The example has fewer steps here."""
    source = (ROOT / "examples/elastic.py").read_text()
    assert source.count("state.step < 200") == 1

    def kill_a_rank(job: int) -> None:
        deadline = time.monotonic() + 40
        while not any(read_head(file) == b"complete" for file in room.glob("mpitrain-*/copy-*-00000001-00001.1")):
            assert time.monotonic() < deadline, "no copy was taken"
            time.sleep(0.02)
        (pid,) = [pid for pid in session_processes(job) if rank_of(pid) == 1]
        os.kill(pid, signal.SIGKILL)

    script = source.replace("state.step < 200", "state.step < 40")
    env = {"PYTHONPATH": str(ROOT), "MPITRAIN_SHM_DIR": str(room)}
    result = launch(2, "-c", script, options=["--with-ft", "ulfm"], env=env, during=kill_a_rank, timeout_s=90)
    assert result.returncode == 0, str(result)
    said = re.search(r"lost rank 1 on \S+ \(process \d+\): 1 rank goes on from step (\d+)", result.stdout)
    assert said and int(said[1]) in (10, 20, 30, 40), str(result)
    assert list(room.iterdir()) == []


@pytest.mark.rest
@needs_open_mpi
def test_a_job_that_is_not_elastic_takes_the_copies_over_into_a_checkpoint(
    start: Start, undisturbed: Path, corpus: Path
) -> None:
    job = start(2)
    reaches(job, 22)
    job.kill()
    assert job.wait_until_left_alone(10) and len(copies(job.run)) >= 4
    result = launch(1, "-m", "mpitrain", "--run", str(job.run), "--data.path", str(corpus), *SETTINGS, timeout_s=60)
    assert result.returncode == 0, str(result)
    begins = re.search(r"goes on from the copies of step (\d+) in node memory", result.stdout)
    assert begins and int(begins[1]) >= 15, str(result)
    assert copies(job.run) == []
    saved = [checkpoint.step for checkpoint in ckpt.list_checkpoints(job.run / "checkpoints")]
    assert saved == [int(begins[1]), STEPS], str(result)
    np.testing.assert_allclose(losses(job.run), losses(undisturbed), rtol=1e-5, err_msg=str(result))


@pytest.mark.rest
@needs_open_mpi
def test_an_error_of_all_ranks_with_work_is_one_line_also_with_an_idle_rank(tmp_path: Path, corpus: Path) -> None:
    words = ["--run", str(tmp_path / "run"), "--data.path", str(corpus), *SETTINGS, *ELASTIC]
    words += ["--parallel.tensor", "2", "--optim.lr", "1e30", "--optim.clip-norm", "0"]
    result = launch(3, "-m", "mpitrain", *words, options=["--with-ft", "ulfm"], timeout_s=60)
    assert result.returncode == 1, str(result)
    assert "1 more without work, because they do not fit the layout" in result.stdout, str(result)
    assert len(re.findall("mpitrain: error: step .* loss nan", result.stderr)) == 1, str(result)
    assert "Traceback" not in result.stderr and "MPI_ABORT" not in result.stderr, str(result)


@pytest.mark.rest
@needs_open_mpi
def test_with_too_little_node_memory_one_line_says_so_and_the_job_trains(tmp_path: Path, corpus: Path) -> None:
    words = ["--run", str(tmp_path / "run"), "--data.path", str(corpus), *SETTINGS, *ELASTIC, "--train.steps", "12"]
    words += ["--parallel.storage", "private"]
    try:
        with small_disk(tmp_path / "shm", 1 << 20):
            env = {"MPITRAIN_SHM_DIR": str(tmp_path / "shm")}
            result = launch(2, "-m", "mpitrain", *words, options=["--with-ft", "ulfm"], env=env, timeout_s=60)
            assert list((tmp_path / "shm").iterdir()) == []
    except PermissionError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    assert result.returncode == 0, str(result)
    said = f"no further copies of the state: expected .* of node memory in {tmp_path}/shm, and .* free: .*set MPITRAIN_SHM_DIR.*; after"
    assert len(re.findall(said, result.stdout)) == 1, str(result)
    assert len(losses(tmp_path / "run")) == 12


@pytest.mark.rest
def test_without_ulfm_one_line_says_so_and_the_job_trains(tmp_path: Path, corpus: Path) -> None:
    words = ["--run", str(tmp_path / "run"), "--data.path", str(corpus), *SETTINGS, *ELASTIC, "--train.steps", "3"]
    result = launch(2, "-m", "mpitrain", *words)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("train.elastic: a lost rank ends this job, because ") == 1, str(result)
    assert len(losses(tmp_path / "run")) == 3
    assert not (tmp_path / "run" / ".lease").exists()


def test_mpich_has_no_ulfm() -> None:
    if not (MPICH / "bin/mpirun").exists():
        pytest.skip("PyPI's MPICH is not installed")
    script = "import collectives; from collectives import recovery; comm = collectives.world(); print('because', recovery.obstacle())"
    result = run(
        [MPICH / "bin/mpirun", "-np", "2", ROOT / ".venv/bin/python", "-c", script],
        cwd=ROOT,
        env={**job_environment(2)[1], "MPI4PY_LIBMPI": str(MPICH / "lib/libmpi.so.12")},
    )
    assert result.returncode == 0, str(result)
    assert len(re.findall(r"MPI is MPICH [\d.]+; expected Open MPI 5 or later with ULFM", result.stdout)) == 2, str(
        result
    )
