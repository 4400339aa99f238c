"""What the main job refuses: one line that says what to do, a non-zero exit of all ranks, within seconds."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tensors
from launching import ROOT, is_open_mpi, launch, run
from main_job import assert_same_end, command, error_line, losses, train, trained

import ckpt
from benchmarks.chaos.disk import small_disk

pytestmark = [pytest.mark.rest, pytest.mark.timeout_s(240)]

WholeRun = Callable[[int], Path]

# On a free machine an error takes 1 s before torch is loaded and 3 s after; other work on the machine adds to that.
SECONDS = 30.0


MISTAKES: list[tuple[list[str], str]] = [
    (["--train.step", "5"], "unknown setting --train.step: did you mean --train.steps?"),
    (["--train.batch", "13"], "train.batch: expected a multiple of 2 = 2 ranks x 1 (train.accumulate), got 13"),
    (
        ["--parallel.pipeline", "2", "--parallel.schedule", "dualpipe-v"],
        "dualpipe-v: expected at least 2 x 2 ranks = 4 micro-batches, got 1; train.accumulate is the number of micro-batches",
    ),
    (["--parallel.stages-per-rank", "2"], "parallel.stages_per_rank: the schedule 1f1b has its own number of stages"),
    (["--train.steps", "five"], "--train.steps: expected a whole number, got 'five'"),
    (
        ["--model.kv-heads", "1"],
        "model.kv_heads: a GPT has as many key and value heads as heads, expected 2 or no number, got 1",
    ),
    (["--resume", "{tmp}/none"], "{tmp}/none does not exist"),
    (["--data.path", "{tmp}/none"], "data.path: {tmp}/none does not exist"),
    (["--data.path", "{tmp}/tiny"], "data.path: a window of 32 tokens needs 33 training tokens, got 24"),
    (["--run", "{tmp}/tiny/run"], "run: the folder {tmp}/tiny/run cannot be written: {tmp}/tiny is no folder"),
    (["--train.eval-only"], "train.eval_only: run {tmp}/run has no checkpoint to evaluate"),
    (["--checkpoint.copies", "nonsense://x"], "checkpoint.copies: nonsense://x cannot be reached"),
    (["--checkpoint.copies", "{tmp}/run/checkpoints"], "checkpoint.copies: copies names {tmp}/run/checkpoints, which"),
    (
        ["--checkpoint.driver", "mpio", "--checkpoint.background"],
        "checkpoint.driver: mpio cannot write in the background",
    ),
]


def each_refused(commands: list[list[str]], messages: list[str]) -> list[str]:
    """One job that carries out the commands: each is refused with one line, which has its message, and an exit code.

    Returns what else the job printed.
    """
    script = (
        "import json, sys\nfrom mpitrain.cli import main\nprint([main(a) for a in json.loads(sys.argv[1])], flush=True)"
    )
    result = launch(2, "-c", script, json.dumps(commands), cwd=ROOT, timeout_s=100)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == len(messages), str(result)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith("mpitrain: error: ") and message in line, str(result)
    codes = str([1] * len(messages))
    *others, first, second = result.stdout.splitlines()
    assert result.returncode == 0 and (first, second) == (codes, codes), str(result)
    return others


def test_every_mistake_is_one_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("too short to learn from")
    words = [command(tmp_path / "run", corpus, *(arg.format(tmp=tmp_path) for arg in args))[2:] for args, _ in MISTAKES]
    printed = each_refused(
        [*words, ["trian"]],
        [
            *(message.format(tmp=tmp_path) for _, message in MISTAKES),
            "unknown command 'trian'; expected train, elastic, tokenizer, tokenize, sample, bench, memory, plan, watch, "
            "report, diff, stop, trace, profile, schedules, pack, doctor or chaos",
        ],
    )
    assert printed == []
    assert not (tmp_path / "run").exists(), "it had begun to write before all was checked"


def test_the_driver_of_parallel_hdf5_without_it(corpus: Path, tmp_path: Path) -> None:
    """Early, not at the first save. The h5py of the tests has parallel HDF5, so here it says that it has not."""
    script = (
        "import sys, types, h5py\nh5py.get_config = lambda: types.SimpleNamespace(mpi=False)\n"
        "from mpitrain.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    words = command(tmp_path / "run", corpus, "--checkpoint.driver", "mpio")[2:]
    result = launch(2, "-c", script, *words, cwd=ROOT)
    line = error_line(result)
    assert line.startswith("mpitrain: error: checkpoint.driver: driver='mpio' needs an h5py that was built"), str(
        result
    )
    assert "./mpirun/setup hdf5" in line
    assert not (tmp_path / "run").exists()


# one that is seen before torch is there, and one after
@pytest.mark.parametrize(("args", "message"), MISTAKES[:2], ids=["before torch", "with torch"])
def test_a_run_with_a_mistake_ends_with_an_error(args: list[str], message: str, corpus: Path, tmp_path: Path) -> None:
    result = train(2, tmp_path / "run", corpus, *args)
    assert message.format(tmp=tmp_path) in error_line(result), str(result)
    assert not (tmp_path / "run").exists(), "it had begun to write before all was checked"


def flip(file: Path) -> None:
    """Damage a file in the middle, where tensors are."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(255 - byte for byte in data[middle : middle + 64])
    file.write_bytes(data)


def test_a_damaged_checkpoint(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_run(2), folder)
    newest, second = folder / "checkpoints/step-00000060", folder / "checkpoints/step-00000040"
    before = (folder / "metrics.jsonl").read_text()

    flip(newest / "rank-00001.h5")
    said = error_line(train(2, folder, corpus, "--train.steps", "70"))
    assert "step-00000060" in said and "rank-00001.h5" in said, said
    assert (folder / "metrics.jsonl").read_text() == before

    # What can be seen without reading the tensors is passed over: the one before is taken.
    manifest = newest / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-200])
    said = error_line(train(2, folder, corpus, "--resume", str(newest)))
    assert str(newest) in said, said
    result = trained(2, folder, corpus)
    assert f"goes on from {second}; step-00000060 is damaged" in result.stdout, str(result)
    # The damaged one was replaced by what it should have been.
    assert_same_end(folder, whole_run(2))


def test_a_checkpoint_of_another_model_or_of_something_else(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_run(2), folder)
    before = (folder / "config.toml").read_text()
    ckpt.save(tmp_path / "other", {}, comm=None, meta={"step": 3})
    ways = (["--model.width", "64"], ["--model.family", "llama"])
    commands = [command(folder, corpus, *args, "--train.steps", "70") for args in ways]
    commands += [command(tmp_path / "new", corpus, "--resume", str(tmp_path / "other"))]
    other = "step-00000060 is of another model: {}; continue with its settings"
    each_refused(
        [words[2:] for words in commands],
        [
            other.format("model.width is 32 there, 64 here"),
            other.format("model.family is gpt there, llama here"),
            "was not written by the main job: its meta lacks config, num_ranks, data",
        ],
    )
    assert (folder / "config.toml").read_text() == before


def test_full_shared_memory(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    """The run does without node memory, says so in one line, and trains as with enough: private storage only rounds otherwise."""
    try:
        with small_disk(tmp_path / "shm", 64 << 10):
            result = trained(2, tmp_path / "run", corpus, env={"MPITRAIN_SHM_DIR": str(tmp_path / "shm")})
            assert list((tmp_path / "shm").iterdir()) == []
    except PermissionError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    assert (result.stdout + result.stderr).count("set MPITRAIN_SHM_DIR") == 1, str(result)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole_run(2)), rel=1e-5)


def test_a_disk_that_fills_up(corpus: Path, tmp_path: Path, whole_run: WholeRun) -> None:
    """The save fails on all ranks in one line, the checkpoint before stands, and with more room the run ends as if nothing had been."""
    one = sum(file.stat().st_size for file in (whole_run(2) / "checkpoints/step-00000040").iterdir())
    disk = tmp_path / "disk"
    try:
        with small_disk(disk, int(2.6 * one)):
            result = train(2, disk / "run", corpus)
            said = error_line(result)
            assert "No space left on device" in said and "ckpt.save" in said
            newest = ckpt.latest(disk / "run/checkpoints")
            assert newest is not None and newest.name == "step-00000040", str(result)
            assert tensors(newest) == tensors(whole_run(2) / "checkpoints/step-00000040")
            assert sorted(p.name for p in newest.parent.iterdir()) == ["latest", "step-00000020", "step-00000040"]
            assert run(["mount", "-o", f"remount,size={8 * one}", disk]).returncode == 0
            trained(2, disk / "run", corpus)
            assert_same_end(disk / "run", whole_run(2))
    except PermissionError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")


def test_a_loss_that_is_not_finite(corpus: Path, tmp_path: Path) -> None:
    said = error_line(train(2, tmp_path / "run", corpus, "--optim.lr", "1e30", "--optim.clip-norm", "0"))
    assert "loss nan" in said and "no step was taken" in said


RAISES = """
import sys
from mpitrain.job.train import trainer

take_step = trainer.Trainer.train_step

def train_step(self):
    if self.comm.rank == 1 and self.step == 2:
        loss = self.passes._loss
        def fail(rows):
            loss(rows)  # in the middle of the step: the others go on to a backward without this rank
            raise ArithmeticError("something went wrong in the model")
        self.passes._loss = fail
    return take_step(self)

trainer.Trainer.train_step = train_step
from mpitrain.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_rank_that_raises_in_the_middle_of_a_step(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    start = time.monotonic()
    result = launch(
        3, str(script), *command(tmp_path / "run", corpus)[2:], env={"PYTHONPATH": str(ROOT)}, timeout_s=SECONDS
    )
    assert result.returncode != 0, str(result)
    assert "[rank 1] ArithmeticError: something went wrong in the model" in result.stderr, str(result)
    assert "[rank 1] Traceback" in result.stderr and "[rank 0] Traceback" not in result.stderr, str(result)
    # `launch` returns when mpirun has ended and its pipes are closed: no rank holds them any more.
    assert time.monotonic() - start < SECONDS
    assert "step 2/60" in result.stdout and "step 3/60" not in result.stdout


KILLED = """
import os, signal, sys, threading, time
from mpitrain.cli import main

def kill_after_three_steps(metrics):
    while not os.path.exists(metrics) or sum(1 for _ in open(metrics)) < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    file = os.path.join(sys.argv[sys.argv.index("--run") + 1], "metrics.jsonl")
    threading.Thread(target=kill_after_three_steps, args=(file,), daemon=True).start()
sys.exit(main())
"""


def test_the_report_of_a_killed_rank_is_in_the_folder_of_the_run(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    failure = folder / "failure.txt"
    failure.write_text("of an earlier job")
    result = launch(2, "-c", KILLED, *command(folder, corpus, "--train.steps", "100000")[2:], timeout_s=60)
    assert result.returncode != 0, str(result)
    if is_open_mpi() or failure.exists():  # MPICH's mpirun may kill the other rank before it has reported
        text = failure.read_text()
        assert "earlier" not in text, text
        assert re.search(
            r"^rank 1 on \S+ \(process \d+\) has died: its process ended without notice", text, re.MULTILINE
        ), text
        assert re.search(r"its last record, \d\.\d s old:", text), text
        assert text.splitlines()[1] in result.stderr, f"{text}\n{result}"
