"""`python -m mpitrain diff`: what it finds in two runs and in two checkpoints, and its exit codes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import flip_bit
from thread_ranks import on_ranks

import ckpt
from benchmarks.monitoring.recorded_runs import write_run
from mpitrain.job.config.settings import kinds
from mpitrain.job.record import conditions
from mpitrain.job.record.conditions import Effect, effect_of
from mpitrain.view.diff.diff_command import main
from mpitrain.view.diff.starts import of_run
from mpitrain.view.reading.run import read_run

STEPS = 30


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Of a checkpoint after 20 steps."""
    names = [f"model/blocks.{block}.weight" for block in range(11)]
    arrays = np.random.default_rng(0).standard_normal((11, 12, 5), np.float32)
    return {
        **dict(zip(names, arrays, strict=True)),
        "optimizer/exp_avg/a": np.float32([0.0, 1.0]),
        "count": np.array(7),
    }


def save(folder: Path, arrays: dict[str, np.ndarray[Any, Any]], ranks: int, **meta: Any) -> Path:
    """A checkpoint of the main job on so many ranks, which share the rows of each tensor and have states of generators."""

    def act(comm: Any) -> None:
        shards: dict[str, Any] = {"random/states": ckpt.Shard(np.full((1, 4), comm.rank), (ranks, 4), (comm.rank, 0))}
        for name, array in arrays.items():
            shards[name] = array
            if array.ndim:
                first, last = (len(array) * rank // ranks for rank in (comm.rank, comm.rank + 1))
                shards[name] = ckpt.Shard(array[first:last], array.shape, (first, *(0,) * (array.ndim - 1)))
        config = f"[parallel]\nstage = {ranks}\n"
        settings = {"step": 20, "num_ranks": ranks, "config": config, "collectives": {"machine": ranks}}
        ckpt.save(folder, shards, comm=comm, meta=settings | meta)

    on_ranks(ranks, act)
    return folder


def make_run(
    folder: Path, ranks: int = 2, arrays: dict[str, np.ndarray[Any, Any]] | None = None, **options: Any
) -> Path:
    """A run with a checkpoint, and with a metric of its user that measures something."""
    write_run(
        folder, steps=STEPS, ranks=ranks, evaluate_every=10, layers_every=10, skipped=[4], figures={"my/noise": 1.0},
        settings={"parallel": {"stage": ranks}}, **options,
    )  # fmt: skip
    save(folder / "checkpoints/step-00000020", tensors() if arrays is None else arrays, ranks)
    return folder


def change(folder: Path, step: int, name: str, value: Any) -> None:
    """Another value of a metric, in the line that has it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["step"] == step and (name in line or name == "skipped"))
    line[name] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def diff(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> str:
    """What the command prints; the command ends with this exit code, and says nothing on stderr."""
    found = main(list(map(str, words)))
    out, err = capsys.readouterr()
    assert (found, err) == (code, ""), out
    return out


def test_runs_on_other_ranks_with_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=3)
    for run in (a, b):  # noise of `write_run` depends on the number of ranks
        (run / "metrics.jsonl").write_bytes((a / "metrics.jsonl").read_bytes())
    change(b, 9, "my/noise", 5.0)
    change(b, 9, "step_s", 5.0)
    out = diff(capsys, a, b, code=0)
    rows = [line.split() for line in out.splitlines()]
    for name in ("ranks", "parallel.stage"):
        assert [name, "2", "3", "may", "change", "bits"] in rows
    assert (
        "the same bits: loss, grad_norm, lr, skipped in 30 steps; heldout_loss, heldout_bits_per_byte, grad_norm/"
        in out
    )
    assert "step_s" not in out and "my/noise" not in out
    assert "step-00000020: the same bits in 13 tensors; not compared: random/states" in out
    assert "from different tables: may change bits" in out
    assert out.splitlines()[-1].startswith("the same bits: ") and "the tensors of 1 checkpoint" in out.splitlines()[-1]
    assert "first step that differs: 9, in my/noise" in diff(capsys, a, b, "--only", "my/*", code=1)


def test_the_first_step_and_tensor_that_differ_and_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tensors()
    for block in (10, 2):  # 2 comes before 10
        changed[f"model/blocks.{block}.weight"][7:, 3] += 0.25
    changed["optimizer/exp_avg/a"][0] = -0.0
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", arrays=changed)
    for run, arrays in ((a, tensors()), (b, changed)):
        save(run / "checkpoints/step-00000030", arrays, 2)
    change(a, 17, "loss", 2.25)
    change(b, 17, "loss", math.nextafter(2.25, 9.0))
    change(b, 17, "skipped", True)
    change(b, 20, "heldout_loss", None)
    out = diff(capsys, a, b, code=1)
    assert (
        "first step that differs: 17, in loss 2.25 and 2.2500000000000004 (2e-16 relative), skipped 0.0 and 1.0 (1 "
        in out
    )
    assert "the same bits: grad_norm, lr in 30 steps" in out
    assert ["heldout_loss", "1", "3", "20"] in [line.split()[:4] for line in out.splitlines()]
    assert "step-00000020: 3 of 14 tensors differ\n" in out and "not compared: step-00000030" in out
    first = "model/blocks.2.weight: 5 of 60 elements differ, the first at [7, 3], by at most 0.25 ("
    assert f"first difference of checkpoints: step-00000020, {first}" in out
    found = json.loads(diff(capsys, a, b, "--json", code=1))
    (checkpoint,) = found["checkpoints"]
    assert [(each["name"], each["first"]) for each in checkpoint["tensors"]] == [
        ("model/blocks.2.weight", [7, 3]), ("model/blocks.10.weight", [7, 3]), ("optimizer/exp_avg/a", [0]),
    ]  # fmt: skip
    assert checkpoint["tensors"][2]["max_abs"] == 0 and not found["same"]
    diff(capsys, a, b, "--only", "lr", "--only", "model/blocks.1.*", code=0)


def test_records_that_are_short_damaged_or_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", torn=True)
    lines = (a / "metrics.jsonl").read_text().splitlines(keepends=True)
    damaged = [*lines[:8], "\0\0\0\n", *lines[9:-6]]
    again = lines[5].replace('"loss":', '"loss":1')  # before a crash; the last line of a step counts
    (b / "metrics.jsonl").write_text("".join([again, *damaged, '{"step": 99, "lo']))
    (b / "config.toml").unlink()
    out = diff(capsys, a, b, code=1)
    assert "B  metrics.jsonl has 1 damaged line, which is left out" in out and "B  there is no config.toml" in out
    assert (
        "only A has 6 steps: 9, 26 to 30\n" in out and "the same bits: loss, grad_norm, lr, skipped in 24 steps" in out
    )
    assert "train.steps" not in out, "the settings of one run alone say nothing"
    assert out.endswith("one run has more steps; with --common this is no difference\n")
    diff(capsys, a, b, "--common", code=0)
    (b / "metrics.jsonl").unlink()
    assert f"no step was compared, because {b}/metrics.jsonl has none" in diff(capsys, a, b, code=1)
    diff(capsys, a, b, "--only", "model/*", code=0)


def test_two_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", tensors(), 2)
    hardware = {"threads": 1, "device": "cpu", "environment": {"torch": "2.13", "numpy": "2.4"}}
    out = diff(capsys, a, save(tmp_path / "b", tensors(), 4, lease=3, hardware=hardware), code=0)
    assert ["ranks", "2", "4", "may", "change", "bits"] in [line.split() for line in out.splitlines()]
    assert f"A  {a}: step 20 · 2 ranks\n" in out
    assert "b: step 20 · 4 ranks with 1 thread each · CPU · torch 2.13, numpy 2.4\n" in out
    assert "a and b: the same bits in " in out
    out = diff(capsys, a, save(tmp_path / "c", tensors(), 2, data={"next_sample": 60}), code=1)
    assert out.endswith("first difference of checkpoints: a and c, meta data.next_sample: nothing -> 60\n")
    fewer = {name: array for name, array in tensors().items() if name != "model/blocks.3.weight"}
    out = diff(capsys, a, save(tmp_path / "d", fewer | {"count": np.array([7])}, 2), code=1)
    assert "only in A: model/blocks.3.weight\n" in out and out.endswith("a and d, count has another shape\n")


def test_checkpoints_of_other_programs_tell_the_number_of_their_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks in (1, 3):
        on_ranks(ranks, lambda comm, at=tmp_path / str(ranks): ckpt.save(at, {"w": np.zeros(3)}, comm=comm))
    out = diff(capsys, tmp_path / "1", tmp_path / "3", code=0)
    assert ["ranks", "1", "3", "may", "change", "bits"] in [line.split() for line in out.splitlines()]
    assert f"A  {tmp_path / '1'}: 1 rank\n" in out and f"B  {tmp_path / '3'}: 3 ranks\n" in out
    assert out.endswith("1 and 3: the same bits in 1 tensor\n")


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    checkpoint = b / "checkpoints/step-00000020"
    later = write_run(tmp_path / "later", steps=0)
    cases = [
        (
            [a, tmp_path / "none"],
            "none: expected the folder of a run, with metrics.jsonl, config.toml or events.jsonl, got no such",
        ),
        ([a, checkpoint], f"{checkpoint} is a checkpoint, and {a} is none; expected two runs or two checkpoints"),
        ([a, later], "have no step and no checkpoint in common"),
        ([a, b, "--only", "losses"], "--only: neither has a metric or a tensor called 'losses'"),
        ([a, b], "do not match their checksum"),
    ]
    flip_bit(checkpoint / "rank-00001.h5", tensors()["model/blocks.0.weight"][6:].tobytes())
    for words, expected in cases:
        assert main(list(map(str, words))) == 2
        err = capsys.readouterr().err
        assert expected in err and err.startswith("mpitrain: error: diff: ") and err.count("\n") == 1


def test_hardware_that_changed_during_a_run(tmp_path: Path) -> None:
    lost, whole = (read_run(write_run(tmp_path / str(at), steps=200, ranks=3, lost_after=at)) for at in (100, None))
    found = {each.name: (each.a, each.b) for each in conditions.differing(*map(of_run, (lost, whole)))}
    assert found == {"ranks": ("3, then 2", "3"), "layout.dp_shard": ("3, then 2", "3")}


def test_effects_of_settings() -> None:
    """Names that no setting has would be mistakes, and each setting has an effect that somebody has thought of."""
    named = {
        name
        for names in (conditions._OF_VALUES, conditions._HARMLESS, conditions._OF_ORDER, conditions._KEPT_BY_SLICES)
        for name in names
        if "." in name and not name.startswith("layout.")
    }
    assert named <= set(kinds())
    effects = {name: effect_of(name, has_slices=False) for name in ("ranks", "torch", *kinds())}
    assert (
        effects["ranks"] == effects["torch"] == effects["parallel.stage"] == effects["train.accumulate"] == Effect.BITS
    )
    assert effects["optim.lr"] == effects["train.seed"] == effects["parallel.wire"] == Effect.VALUES
    assert effects["log.every"] == effects["run"] == effects["train.eval_every"] == Effect.NONE
    assert effect_of("ranks", has_slices=True) == effect_of("parallel.stage", has_slices=True) == Effect.KEPT
    assert effect_of("parallel.checkpoint_activations", has_slices=True) == Effect.KEPT
    assert effect_of("threads", has_slices=True) == effect_of("parallel.tensor", has_slices=True) == Effect.BITS


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ({}, {"threads": 2, "ranks": 3}, []),  # without slices
        ({"slices": 4}, {"slices": 4, "ranks": 3, "stage": 1, "eval_every": 7}, []),
        ({"slices": 4, "asked": 1}, {"slices": 4}, []),  # the same threads, which one of them has asked for
        ({"slices": 4}, {"slices": 8, "threads": 2, "ranks": 3}, ["threads 1 -> 2", "train.slices 4 -> 8"]),
        ({"slices": 4, "torch": "2.12"}, {"slices": 4, "batch": 8}, ["torch 2.12 -> 2.13", "train.batch 16 -> 8"]),
        ({}, {"slices": 4, "ranks": 3}, ["ranks 2 -> 3", "train.slices 0 -> 4"]),
        ({"slices": 4, "stage": 0}, {}, ["train.slices 4 -> 0", "parallel.stage 0 -> 3"]),
        ({"slices": 4, "threads": None}, {"slices": 4, "threads": 2}, []),  # unknown, as in older checkpoints
    ],
)
def test_what_changes_the_bits_of_a_run_with_slices_that_goes_on(
    then: dict[str, Any], now: dict[str, Any], changes: list[str]
) -> None:
    def known(own: dict[str, Any]) -> conditions.Conditions:
        has = {"slices": 0, "batch": 16, "eval_every": 0, "stage": 3, "ranks": 2, "threads": 1, "torch": "2.13"} | own
        train = "".join(f"{name} = {has[name]}\n" for name in ("slices", "batch", "eval_every"))
        asked = f"threads = {has['asked']}\n" if "asked" in has else ""
        meta: dict[str, Any] = {
            "config": f"[train]\n{train}[parallel]\nstage = {has['stage']}\n{asked}",
            "num_ranks": has["ranks"],
        }
        if has["threads"] is not None:
            meta["hardware"] = {"threads": has["threads"], "device": "cpu", "environment": {"torch": has["torch"]}}
        return conditions.of_checkpoint(meta)

    assert list(map(str, conditions.changes_of_bits(known(then), known(now)))) == changes
