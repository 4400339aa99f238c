"""Waits that last, in a sharded model and in the main job: a notice says where each rank is. One real job, for it takes seconds."""

import re
from pathlib import Path

import pytest
from launching import ROOT, launch, without_names
from main_job import SETTINGS

pytestmark = pytest.mark.rest

EXIT_CODE = 124
JOB = """
import sys, time, torch, collectives, mpitrain
import mpitrain.cli, mpitrain.job.data
comm = collectives.world()
x = torch.ones(2, 8)


def late():
    time.sleep(2.0)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        late()
        return grad


def sharded(storage):
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(8, 8))
    model.add_module("slow", torch.nn.Identity())
    model.add_module("last", torch.nn.Linear(8, 8))
    for block in (model.first, model.last):
        mpitrain.fully_shard(block, storage=storage)
    return mpitrain.fully_shard(model, storage=storage)


def evaluate(model):
    with torch.no_grad():
        model(x)


def step(model, num_micro_batches):
    with model.no_sync():
        for _ in range(num_micro_batches):
            model(x).sum().backward()
    model(x).sum().backward()


def case(name):
    comm.barrier()
    if comm.rank == 0:
        print("CASE", name, file=sys.stderr, flush=True)


models = {storage: sharded(storage) for storage in ("resident", "private")}
for storage, model in models.items():
    step(model, 1)
    case(f"forward_{storage}")
    if comm.rank == 1:
        late()
    evaluate(model)

model = models["resident"]
case("backward")
hook = model.slow.register_forward_hook(lambda module, args, y: Late.apply(y) if comm.rank == 1 else None)
step(model, 0)
hook.remove()

case("fence")
hook = model.slow.register_forward_pre_hook(lambda module, args: late() if comm.rank == 1 else None)
y = model(x)
hook.remove()
list(model.parameters())
y.sum().backward()


case("save")
if comm.rank == 1:
    late()
mpitrain.save(sys.argv[2] + "-saved", model)


def get(self, step, *rows, get=mpitrain.job.data.Batches.get):
    if step == 2 and comm.rank == 1:
        late()
    return get(self, step, *rows)


case("main_job")
mpitrain.job.data.Batches.get = get
assert mpitrain.cli.main(sys.argv[1:]) in (None, 0)

case("no_sync")
collectives.set_deadline(2)
step(model, 1 + comm.rank)
"""


def test_a_wait_that_lasts_is_told(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(8):
        (tmp_path / "corpus" / f"{number}.txt").write_text("all work and no play makes a dull test. " * 200)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    args = ["--run", str(tmp_path / "run"), "--data.path", str(tmp_path / "corpus"), *SETTINGS, "--train.steps", "4"]
    env = {"MPITRAIN_NOTICE_S": "0.5", "MPITRAIN_PROGRESS_THREAD": "0", "PYTHONPATH": str(ROOT)}
    result = launch(2, str(job), *args, cwd=ROOT, env=env, timeout_s=100)
    assert result.returncode == EXIT_CODE, str(result)
    assert result.stderr.count("the deadline is 2 s (MPITRAIN_DEADLINE_S). The job ends.") == 1, str(result)
    told = {text.split(None, 1)[0]: text for text in without_names(result.stderr).split("CASE ")[1:]}

    def check(case: str, *expected: str, deadline_s: int = 600) -> None:
        """A notice of `case` says so of ranks 0 and 1. On a busy machine other waits last, too."""
        notices = re.findall(r"\[rank \d\] notice: rank \d has waited \d+ s; (.*)((?:\n\[rank \d\]   .*)*)", told[case])
        found = []
        for end, lines in notices:
            places = dict(re.findall(r"\[rank \d\]   (rank \d): (.*)", lines))
            if all(re.fullmatch(words, places.get(f"rank {rank}", "")) for rank, words in enumerate(expected)):
                found.append(end)
        assert 1 <= len(found) <= 3, f"{case}: {expected}\n{notices}"  # after 0.5, 1 and 2 s at most
        assert found[0] == f"at {deadline_s} s the job ends (MPITRAIN_DEADLINE_S)"

    here, late = rf"at {job}:\d+ in", rf"main thread at {job}:\d+ in late, from .*"
    wait, behind = r"for \d+\.\d s, waiting for rank 1", f"in no operation, {late}"
    fence = r"in world node \(ranks 0, 1\): #\d+ barrier"
    check("forward_resident", f"{fence}, in the forward of Sequential, {here} evaluate, {wait}", behind)
    gather = r"in world \(ranks 0, 1\): #\d+ all_gather\(.*\) by \w+, in the forward of first \(Linear\)"
    check("forward_private", f"{gather}, {here} evaluate, {wait}", behind)
    reduction = (
        r"in world \(ranks 0, 1\): #\d+ reduce_scatter\(.*\) by shared, in the backward, which reduces the gradients of"
    )
    check("backward", rf"{reduction} \w+ \(Linear\), {here} step, {wait}", behind)
    put_off = "in the wait for the other ranks' forwards, before parameters may be written"
    check(
        "fence",
        f"{fence}, {put_off}, {here} <module>, {wait}",
        f"in no operation, in the forward of Sequential, {late}",
    )
    check("save", rf"in world \(ranks 0, 1\): #\d+ together, {here} <module>, {wait}", behind)
    norm = r"#\d+ all_reduce\(1 x float64, op=sum\) by mpi, at .*/mpitrain/job/train/steps/stepper.py:\d+ in clip"
    mine = rf"from {job}:\d+ in <module>"
    check("main_job", rf"in world \(ranks 0, 1\): {norm}, {mine}, {wait}", behind)  # rank 1 reads the next step's batch
    apart = rf"in world.*, in the .*backward of Sequential, {here} step, for \d+\.\d s, waiting for rank 0"
    check("no_sync", rf"{reduction} \w+ \(Linear\), {here} step, {wait}", apart, deadline_s=2)
    assert "]   => MPITRAIN_DEBUG=1 finds the first call that differs between the ranks\n" in told["no_sync"], str(
        result
    )


STARTS_NO_MPI = """
import os
if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == 1:
    raise SystemExit(0)
import collectives
collectives.world()
"""


def test_a_rank_that_does_not_start_mpi_is_told_and_the_job_ends() -> None:
    """MPI_Init of the other ranks waits for it, and MPI cannot end that wait."""
    env = {"MPITRAIN_MEETING_S": "0.3", "MPITRAIN_DEADLINE_S": "0.5"}
    result = launch(2, "-c", STARTS_NO_MPI, env=env, timeout_s=30)
    assert result.returncode == 124, str(result)
    first, last = re.findall(r"\[rank 0\] world\(\) has waited \d s (.*)", result.stderr)
    assert first.startswith("in MPI_Init for ranks that have not started MPI"), str(result)
    assert last.startswith("(MPITRAIN_DEADLINE_S) in MPI_Init for ranks that have not started MPI"), str(result)
