"""The main job under a real mpirun: its numbers, its ends and its beginnings. What it refuses is in test_main_job_errors.py."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from checkpoints import flip_bit, tensors
from extent import extent
from launching import ROOT, clean_environment, end_session, is_open_mpi, job_environment, launch, run
from main_job import (
    BATCH,
    CONTEXT,
    STEPS,
    assert_same_end,
    command,
    heldout_losses,
    losses,
    metrics,
    outcome,
    train,
    trained,
)

import ckpt
from mpitrain import cli
from mpitrain.job.config import differences, from_toml, parse
from mpitrain.job.data import Batches, HeldoutBatches, read_into, scan
from mpitrain.models import TransformerConfig, build, resolve
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.timeout_s(300)

WholeRun = Callable[[int], Path]

# Ranks add parts of a batch in another order than one process does, which moves the last bits of a gradient (1e-7 of it); Adam
# divides by its size and so hands that on to parameters with tiny gradients undiminished. Measured over 60 steps: losses (5.5 to
# about 3) differ by up to 1.4e-6. A wrong clip, decay, learning rate or batch shows far above: see the last test of this group.
FP32 = {"rtol": 0.0, "atol": 1e-5}
# bf16 has 8 bits: each activation is off by up to 0.4 %. Measured: up to 0.011.
BF16 = {"rtol": 0.0, "atol": 0.03}


def tokens_of(corpus: Path) -> tuple[np.ndarray, np.ndarray]:
    listing = scan([str(corpus)])
    parts = []
    for part in (listing.train, listing.heldout):
        parts.append(np.empty(part.num_tokens, np.uint8))
        read_into(part, parts[-1])
    return parts[0], parts[1]


SMALL: dict[str, Any] = {"context": CONTEXT, "width": 32, "layers": 2, "heads": 2}
GPT, GROUPED = resolve("tiny", **SMALL), resolve("tiny", "llama", **SMALL, kv_heads=1)


def plain_loop(
    corpus: Path, *, clip_norm: float = 1.0, config: TransformerConfig = GPT
) -> tuple[list[float], list[float]]:
    """Losses of the steps and of the evaluations (after steps 25, 50 and 60) of one process that knows nothing of sharding."""
    torch.set_num_threads(1)
    tokens, heldout_tokens = tokens_of(corpus)
    batches = Batches(tokens, context=CONTEXT, batch=BATCH, seed=0)
    heldout = HeldoutBatches(heldout_tokens, context=CONTEXT, batch=BATCH, num_batches=2)
    model = build(config)
    initialize(model, seed=0)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        rows_BL = torch.from_numpy(rows)  # noqa: N806
        return torch.nn.functional.cross_entropy(model(rows_BL[:, :-1]).flatten(0, 1), rows_BL[:, 1:].flatten())

    of_steps, of_evaluations = [], []
    for step in range(STEPS):
        warm = (step + 1) / 10
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / (STEPS - 1 - 10))) / 2
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (warm if step < 10 else cosine)
        optimizer.zero_grad()
        loss = loss_of(batches.get(step, range(BATCH)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, clip_norm)
        optimizer.step()
        of_steps.append(loss.item())
        if step + 1 in (25, 50, STEPS):
            with torch.no_grad():
                of_evaluations.append(sum(loss_of(heldout.get(i, range(BATCH))).item() for i in range(2)) / 2)
    return of_steps, of_evaluations


@pytest.fixture(scope="session")
def plain(corpus: Path) -> tuple[list[float], list[float]]:
    return plain_loop(corpus)


# The numbers


# three ranks: with storage="private", below
@pytest.mark.parametrize("num_ranks", extent([1, 2, 4], [1, 2, 3, 4]))
def test_losses_are_those_of_a_plain_loop(
    num_ranks: int, whole_run: WholeRun, plain: tuple[list[float], list[float]]
) -> None:
    folder = whole_run(num_ranks)
    np.testing.assert_allclose(losses(folder), plain[0], **FP32)
    np.testing.assert_allclose(heldout_losses(folder), plain[1], **FP32)
    assert plain[0][-1] < plain[0][0] - 1.5  # it learned something, so that there was something to compare


@pytest.mark.rest
@pytest.mark.parametrize(
    ("num_ranks", "args", "tolerance"),
    [
        (3, ["--parallel.storage", "private", "--parallel.no-reshard-after-forward", "--train.accumulate", "2"], FP32),
        (2, ["--parallel.param-dtype", "bfloat16", "--train.accumulate", "2"], BF16),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_so_they_are_with_other_memory_micro_batches_and_bf16(
    num_ranks: int,
    args: list[str],
    tolerance: dict[str, float],
    corpus: Path,
    tmp_path: Path,
    plain: tuple[list[float], list[float]],
) -> None:
    trained(num_ranks, tmp_path / "run", corpus, *args)
    np.testing.assert_allclose(losses(tmp_path / "run"), plain[0], **tolerance)
    np.testing.assert_allclose(heldout_losses(tmp_path / "run"), plain[1], **tolerance)


@pytest.mark.rest
def test_a_llama_is_stopped_and_goes_on_with_its_heads_of_keys_on_both_ranks(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, llama = tmp_path / "run", ("--model.family", "llama", "--model.kv-heads", "1")
    stopped = trained(2, folder, corpus, *llama, when="step 20/", send=signal.SIGUSR1)
    assert "model llama tiny: 0.05 M parameters" in stopped.stdout and "as asked" in stopped.stdout, str(stopped)
    resumed = trained(2, folder, corpus, *llama, "--parallel.tensor", "2")
    assert "now 2 ranks, 2 a layer" in resumed.stdout, str(resumed)
    of_steps, of_evaluations = plain_loop(corpus, config=GROUPED)
    np.testing.assert_allclose(losses(folder), of_steps, **FP32)
    np.testing.assert_allclose(heldout_losses(folder), of_evaluations, **FP32)
    assert resumed.stdout.endswith("sample:\n" + sampled_here(capsys, "--checkpoint", str(folder), "--bytes", "8"))


def test_the_tolerance_would_notice_a_wrong_clip(corpus: Path, plain: tuple[list[float], list[float]]) -> None:
    wrong = np.abs(np.subtract(plain_loop(corpus, clip_norm=1.05)[0], plain[0])).max()
    assert wrong > 100 * FP32["atol"]


# Its ends, and going on from them


def test_a_run_stopped_by_a_signal_goes_on_to_the_same_bits(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    folder, place = tmp_path / "run", tmp_path / "copies"
    copies = ("--checkpoint.copies", str(place))
    stopped = train(2, folder, corpus, *copies, when="step 20/", send=signal.SIGUSR1)
    assert stopped.returncode == 0, str(stopped)
    said = re.search(r"stopped after step (\d+) as asked", stopped.stdout)
    assert said is not None, str(stopped)
    step = int(said[1])
    assert 20 <= step < STEPS, "the signal came too late to stop anything"
    newest = ckpt.latest(folder / "checkpoints")
    assert newest is not None and newest.name == f"step-{step:08d}"
    assert f"saved {newest}" in stopped.stdout
    meta = ckpt.open(newest).meta
    assert (meta["step"], meta["num_ranks"], meta["data"]["next_sample"]) == (step, 2, step * BATCH)
    assert len(losses(folder)) == step

    # What is damaged since comes from the copy.
    flip_bit(newest / "rank-00001.h5")
    resumed = trained(2, folder, corpus, *copies)
    assert f"goes on from {newest}" in resumed.stdout
    assert f"rank 1 of 2]; going on with the copy {place / newest.name}" in resumed.stderr, str(resumed)
    assert "setting changed" not in resumed.stdout
    assert_same_end(folder, whole_run(2))

    last = ckpt.latest(folder / "checkpoints")
    assert last is not None
    shutil.rmtree(last)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = trained(2, folder, corpus, *copies)
    assert f"goes on from {place / last.name}" in again.stdout, str(again)
    assert f"nothing left to do: {STEPS} of {STEPS} steps are done" in again.stdout, str(again)
    assert "tokens/s" not in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.rest
def test_stopped_between_a_step_and_its_evaluation(corpus: Path, tmp_path: Path) -> None:
    """The evaluation is made up for, so that metrics.jsonl is that of the uninterrupted run."""
    folder, stop_file = tmp_path / "run", tmp_path / "stop"
    stop_file.touch()
    args = ("--train.eval-every", "1", "--train.steps", "2")
    stopped = trained(1, folder, corpus, *args, env={"MPITRAIN_STOP_FILE": str(stop_file)})
    assert "stopped after step 1 as asked" in stopped.stdout, str(stopped)
    assert [(line["step"], "loss" in line) for line in metrics(folder)] == [(1, True)]
    trained(1, folder, corpus, *args)
    assert [(line["step"], "loss" in line) for line in metrics(folder)] == [
        (step, is_step) for step in (1, 2) for is_step in (True, False)
    ]


# Prints when torch is about to be imported and then takes its time: a moment at which ranks cannot do anything about a request yet.
SLOW_START = """
import runpy, sys, time
class Announce:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            print("about to import torch", flush=True)
            time.sleep(0.5)
sys.meta_path.insert(0, Announce())
sys.argv[0] = "mpitrain"
runpy.run_module("mpitrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.rest
def test_a_signal_while_torch_is_imported_is_not_lost(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "slow_start.py"
    script.write_text(SLOW_START)
    mpirun, env = job_environment(2)
    words = [mpirun, "-np", "2", sys.executable, script, *command(tmp_path / "run", corpus)[2:]]
    result = run(
        words, env={**env, "PYTHONPATH": str(ROOT)}, when="about to import torch", send=signal.SIGUSR1, timeout_s=60
    )
    assert result.returncode == 0, str(result)
    assert "stopped after step 1 as asked" in result.stdout, str(result)
    assert ckpt.latest(tmp_path / "run/checkpoints") is not None


@pytest.mark.rest
def test_ctrl_c_to_mpirun_train_saves_and_ends(corpus: Path, tmp_path: Path) -> None:
    """The script and the real job together; the script's own tests are in test_scripts.py."""
    checkout = tmp_path / "checkout"
    (checkout / "mpirun").mkdir(parents=True)
    for name in ("train", "lib.sh"):
        shutil.copy(ROOT / "mpirun" / name, checkout / "mpirun" / name)
    (checkout / "mpirun/setup").write_text("#!/bin/sh\n")
    (checkout / "mpirun/setup").chmod(0o755)
    (checkout / ".venv").symlink_to(sys.prefix)
    for package in ("mpitrain", "ckpt", "collectives"):
        (checkout / package).symlink_to(ROOT / package)
    words = [checkout / "mpirun/train", "-np", "2", *command(tmp_path / "run", corpus, "--train.steps", "100000")[2:]]
    result = run(words, cwd=checkout, when="step 5/", send=signal.SIGINT, timeout_s=60)
    assert result.returncode == 0, str(result)
    said = re.search(r"stopped after step (\d+) as asked", result.stdout)
    newest = ckpt.latest(tmp_path / "run/checkpoints")
    assert said is not None and newest is not None and newest.name == f"step-{int(said[1]):08d}", str(result)


@pytest.mark.rest
@pytest.mark.skipif(not is_open_mpi(), reason="MPICH's mpirun leaves its ranks the time to save")
def test_ctrl_c_to_open_mpi_s_mpirun_says_what_is_lost_and_what_to_do(corpus: Path, tmp_path: Path) -> None:
    result = train(2, tmp_path / "run", corpus, "--train.steps", "100000", when="step 5/", send=signal.SIGINT)
    assert result.returncode != 0 and "as asked" not in result.stdout, str(result)
    assert "no checkpoint was saved. The same command goes on from the last one." in result.stderr, str(result)
    assert re.search(
        r"send SIGUSR1 to mpirun \(it was: kill -USR1 \d+\), or start the job by mpirun/train", result.stderr
    )


@pytest.mark.rest
def test_ctrl_c_after_the_last_checkpoint_ends_the_job_and_promises_nothing(corpus: Path, tmp_path: Path) -> None:
    """While it writes its sample: there is no step to end."""
    args = command(tmp_path / "run", corpus, "--train.steps", "3", "--train.sample-bytes", "1000000")
    result = run([sys.executable, *args], when="saved ", send=signal.SIGINT, timeout_s=30)
    assert result.returncode == -signal.SIGINT and "stopping after this step" not in result.stderr, str(result)
    assert ckpt.latest(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints/step-00000003"


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not is_open_mpi(), reason="the ranks of MPICH's mpirun are not its children")
def test_all_ranks_killed_and_started_again(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    folder = tmp_path / "run"
    mpirun, env = job_environment(2)
    words = [mpirun, "-np", "2", sys.executable, *command(folder, corpus, "--checkpoint.every", "10")]
    with subprocess.Popen(
        words,
        env={**clean_environment(), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        output = []
        for line in job.stdout:
            output.append(line)
            if line.startswith("step 25/"):
                break
        ranks = children(job.pid)
        assert len(ranks) == 2, "".join(output)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        try:
            second = train(2, folder, corpus)
        finally:
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        assert second.returncode != 0 and "Traceback" not in second.stderr, str(second)
        assert f"{folder} is being trained by process {min(ranks)} on " in second.stderr, str(second)
        try:
            job.communicate(timeout=20)
        finally:
            end_session(job)
        assert job.returncode != 0
    newest = ckpt.latest(folder / "checkpoints")
    assert newest is not None
    assert newest.name >= "step-00000010"
    step = ckpt.open(newest).meta["step"]
    assert step < STEPS, "it was killed too late"
    # as a process that is killed while it writes may leave it
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 59, "lo')
    resumed = trained(2, folder, corpus, "--checkpoint.every", "10")
    assert f"goes on from {newest}" in resumed.stdout, str(resumed)
    assert re.search(r"the previous job did \d+ more steps, which no checkpoint has", resumed.stdout), str(resumed)
    assert_same_end(folder, whole_run(2))
    assert [path.name for path in (folder / "checkpoints").glob(".*")] == [], "the dead job's remains were not removed"


@pytest.mark.rest
@pytest.mark.parametrize("num_ranks", extent([3], [1, 3]))
def test_a_run_saved_by_four_ranks_goes_on_with(
    num_ranks: int, corpus: Path, tmp_path: Path, whole_run: WholeRun
) -> None:
    folder, start = tmp_path / "run", whole_run(4) / "checkpoints/step-00000040"
    before = tensors(start)
    result = trained(num_ranks, folder, corpus, "--resume", str(start))
    assert f"goes on from {start}" in result.stdout, str(result)
    assert f"it was saved by 4 ranks, now {num_ranks}" in result.stdout, str(result)
    lines = outcome(folder)
    reference = [line for line in outcome(whole_run(4)) if line[0] > 40]
    assert [line[0] for line in lines] == [line[0] for line in reference]
    # what a line has: loss, lr, grad_norm, or heldout_loss. A norm is some 0.5, and its rounding errors are not averaged as a loss's.
    for index, atol in ((1, FP32["atol"]), (2, 0.0), (3, 1e-3), (4, FP32["atol"])):
        mine, theirs = (
            [math.nan if line[index] is None else line[index] for line in run] for run in (lines, reference)
        )
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol, equal_nan=True)
    assert tensors(start) == before


# The folder


def test_what_a_run_leaves(whole_run: WholeRun, corpus: Path) -> None:
    folder = whole_run(2)
    assert differences(from_toml(folder / "config.toml"), parse(command(folder, corpus)[2:])) == []
    parts = ["data_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "check_s"]
    keys = {
        "step",
        "time",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "step_s",
        *parts,
        "comm_hidden_s",
        "memory_bytes",
        "mfu",
    }
    steps = [line for line in metrics(folder) if "loss" in line]
    assert all(keys <= line.keys() for line in steps)
    assert all(sum(line[part] for part in parts) <= line["step_s"] for line in steps)
    for line in steps:
        assert 0 < line["comm_s"] < line["step_s"] and 0 < line["data_s"] < line["step_s"]
        assert line["tokens_per_s"] == pytest.approx(BATCH * CONTEXT / line["step_s"])
        assert 1e7 < line["memory_bytes"] < 1e10 and 0 < line["mfu"] < 1
    evaluations = [line for line in metrics(folder) if "heldout_loss" in line]
    assert [line["step"] for line in evaluations] == [25, 50, STEPS]
    for line in evaluations:
        assert line["heldout_bits_per_byte"] == pytest.approx(line["heldout_loss"] / math.log(2))
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert sorted(names) == ["latest", "step-00000020", "step-00000040", "step-00000060"]
    meta = ckpt.open(folder / "checkpoints/step-00000040").meta
    assert meta["config"] == (folder / "config.toml").read_text()


@pytest.mark.rest
def test_never_begins_anew_beside_the_old_run_and_keeps_the_last_checkpoints(
    corpus: Path, tmp_path: Path, whole_run: WholeRun
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_run(2), folder)
    args = (
        "--resume",
        "never",
        "--train.steps",
        "9",
        "--checkpoint.every",
        "2",
        "--checkpoint.keep",
        "2",
        "--checkpoint.background",
    )
    result = trained(2, folder, corpus, *args)
    assert f"the earlier run is now {folder}.1" in result.stdout, str(result)
    assert_same_end(tmp_path / "run.1", whole_run(2))
    assert len(losses(folder)) == 9
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000008", "step-00000009"]


@pytest.mark.rest
@pytest.mark.skipif(not h5py.get_config().mpi, reason="this h5py was built without parallel HDF5")
def test_checkpoints_by_parallel_hdf5_are_the_same(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    trained(2, tmp_path / "run", corpus, "--checkpoint.driver", "mpio-collective", "--checkpoint.files", "one")
    assert_same_end(tmp_path / "run", whole_run(2))


@pytest.mark.rest
def test_evaluation_alone(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_run(2), folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = trained(2, folder, corpus, "--train.eval-only")
    assert f"held-out {heldout_losses(folder)[-1]:.4f} nats" in result.stdout, str(result)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    # without a word about data and model: the run's own
    alone = launch(2, "-m", "mpitrain", "--run", str(folder), "--train.eval-only")
    assert f"held-out {heldout_losses(folder)[-1]:.4f} nats" in alone.stdout, str(alone)


# Sampling, in one process

WITHOUT_MPI = "import runpy, sys; sys.modules['mpi4py'] = None; runpy.run_module('mpitrain', run_name='__main__')"


def sample(*args: str) -> Any:
    return run([sys.executable, "-c", WITHOUT_MPI, "sample", *args], cwd=ROOT)


def sampled_here(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command prints, run in this process, which has torch already."""
    assert cli.main(["sample", *args]) == 0
    return capsys.readouterr().out


@pytest.mark.rest
def test_sample_needs_no_mpi_and_repeats_itself(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(2)
    options = ("--checkpoint", str(folder), "--bytes", "40")
    first = sample(*options, "--prompt", "def ")
    assert first.returncode == 0, str(first)
    assert first.stdout.startswith("def ") and len(first.stdout) > 20 and first.stderr == "", str(first)
    assert sampled_here(capsys, *options, "--prompt", "def ") == first.stdout
    checkpoint = folder / "checkpoints/step-00000060"
    other = sampled_here(capsys, "--checkpoint", str(checkpoint), "--bytes", "40", "--prompt", "def ", "--seed", "1")
    assert len(other) > 20 and other != first.stdout


def test_the_sample_at_the_end_is_that_of_the_command(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    printed = whole_run(2).with_suffix(".out").read_text()
    alone = sampled_here(capsys, "--checkpoint", str(whole_run(2)), "--bytes", "8")
    assert printed.endswith("sample:\n" + alone), printed + alone


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "/nowhere/at-all"], "/nowhere/at-all does not exist"),
        (["--checkpoint", "{run}", "--temperature", "-1"], "temperature: expected 0 or more, got -1.0"),
        (["--checkpoint", "{run}", "--prompt", ""], "expected a prompt"),
        (["--checkpoint", "{run}/config.toml"], "config.toml"),
    ],
)
def test_sample_refuses_in_one_line(
    args: list[str], message: str, whole_run: WholeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sample", *(arg.format(run=whole_run(2)) for arg in args)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mpitrain: error: ") and message in said and said.count("\n") == 1


@pytest.mark.rest
def test_one_process_without_mpirun_trains(corpus: Path, tmp_path: Path) -> None:
    words = [sys.executable, *command(tmp_path / "run", corpus, "--train.steps", "3")]
    result = run(words, cwd=ROOT)
    assert result.returncode == 0 and "1 rank on 1 node" in result.stdout, str(result)
    assert len(losses(tmp_path / "run")) == 3
    assert "\x1b" not in result.stdout, "a live bar where there is no terminal"
