"""`profile` on ranks: a short run, measured by layer."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Make

from collectives import Communicator
from mpitrain.job.config import Config, ConfigError
from mpitrain.job.record.adding import Added
from mpitrain.job.train.trainer import Trainer
from mpitrain.models.gpt import Block
from mpitrain.tools.profile.parts import Parts, parts_of
from mpitrain.tools.profile.places import OTHER
from mpitrain.tools.profile.profile_command import main
from mpitrain.tools.profile.sentences import sentences
from mpitrain.tools.profile.steps import MeasuredRun, measured_run

STEPS = 6
LAYERS = "--model.layers", "2", "--model.context", "64", "--model.width", "64"


def settings(make: Make, *args: str) -> Config:
    return make("run", STEPS + 4, *LAYERS, *args).config


def parts(run: MeasuredRun) -> Parts:
    of = run.ranks
    return parts_of([r.times for r in of], [r.stage for r in of], [r.cpu for r in of], [r.hidden for r in of])


@pytest.mark.rest
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "args",
    [
        ("--parallel.stage", "3", "--parallel.storage", "private", "--train.accumulate", "3"),
        ("--parallel.tensor", "2"),
        ("--parallel.pipeline", "2", "--train.accumulate", "3", "--parallel.schedule", "zb-h1"),
        ("--parallel.checkpoint-activations", "block", "--train.max-rewinds", "1"),
    ],
    ids=["sharded", "tensor", "pipeline", "again"],
)
def test_the_parts_add_up_and_no_number_changes(
    comm: Communicator, make: Make, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size == 1 and args[0] in ("--parallel.tensor", "--parallel.pipeline"):
        pytest.skip("needs two ranks")
    plain = make("plain", STEPS + 4, *LAYERS, *args)
    losses = losses_of(plain)
    run = measured_run(settings(make, *args), comm, warm_up=2, steps=STEPS)
    assert list(run.ranks[comm.rank].losses) == losses[2 : 2 + STEPS]
    assert len(run.ranks) == comm.size and not list(plain.run.folder.parent.glob("mpitrain-profile-*"))
    of = parts(run)
    for rank, times in enumerate(run.ranks):
        assert all(seconds >= -1e-4 for one in times.times for counts in one for seconds in counts.values())
        assert of.of_ranks[rank] > 0
    computes = ("forward", "backward")
    blocks = [f"blocks.{n}" for n in range(2)]
    assert of.blocks == blocks and {"embedding", "head", "optimizer", "data"} <= of.layers.keys()
    assert all(max(of.of(block, kind)) > 0 for block in blocks for kind in computes)
    # What has no place is in each step of some 10 ms. An interruption by other processes is in some of them.
    others = [(one.computed[OTHER] + one.communicated[OTHER]) / one.total for rank in run.ranks for one in rank.times]
    assert sorted(others)[1] < 0.15
    if "--parallel.pipeline" in args:
        assert min(of.of("other stages", "wait")) > 0 and max(of.of("weights", "backward")) > 0
        assert len(run.pipelines) == comm.size // 2
    held = run.ranks[comm.rank].held
    mine = [name for name in ("embedding", *blocks, "head") if name in held.layers]
    per_param = {
        kind: sum(held.layers[name][kind] for name in mine) for kind in ("parameters", "gradients", "optimizer")
    }
    own = sum(param.nbytes for param in plain.model.parameters())
    # AdamW's two moments, and a step count for each parameter.
    assert per_param["parameters"] == per_param["gradients"] == own
    assert 2 * own <= per_param["optimizer"] <= 2 * own + 8 * 100
    assert sum(layer["activations"] for layer in held.layers.values()) > 0
    assert held.peak > 1e7 < held.others["process"]  # the process of the tests may have more memory before than now


def losses_of(trainer: Trainer) -> list[float]:
    """Of all steps, on this rank."""
    losses, train_step = [], trainer.train_step

    def noting() -> Any:
        metrics, stop = train_step()
        losses.append(metrics.loss)
        return metrics, stop

    trainer.train_step = noting  # type: ignore[method-assign]
    trainer.fit()
    return losses


@pytest.mark.ranks(2)
def test_activations_are_those_that_the_blocks_save(comm: Communicator, make: Make) -> None:
    run, again = (
        measured_run(settings(make, "--parallel.checkpoint-activations", what), comm, warm_up=1, steps=1)
        for what in ("none", "block")
    )
    rows, tokens, width, heads = 6, 64, 64, 2  # of a rank
    stream = 4 * rows * tokens * width
    kept = run.ranks[comm.rank].held.layers["blocks.1"]["activations"]
    # Two norms, qkv, attention's output and its sums, the MLP's input, its inner layer before and after GELU, and the residual.
    assert 14 * stream <= kept <= 19 * stream + 4 * rows * tokens * heads * 4
    assert 0 < again.ranks[comm.rank].held.layers["blocks.1"]["activations"] <= 2 * stream


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_rank_that_sleeps_is_named_with_its_cause(
    comm: Communicator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Block.forward

    def late(self: Block, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.2 * (comm.rank == 1))
        return forward(self, x, **kwargs)

    monkeypatch.setattr(Block, "forward", late)
    slow, waits, *_ = sentences(parts(measured_run(settings(make), comm, warm_up=1, steps=2)))
    assert slow.startswith("Rank 1 takes") and "it sleeps" in slow
    assert waits.startswith("Rank 0 waits") and "for rank 1, whose time in blocks is" in waits


LATE_CALLBACK = """
import time, mpitrain

class Late(mpitrain.Callback):
    def step(self, moment):
        time.sleep(0.05)

mpitrain.log(callback=Late(), sink=mpitrain.Sink())
"""


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_the_command_prints_on_rank_0_and_writes_json(
    comm: Communicator,
    make: Make,
    shared_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sinks", "callbacks"):
        monkeypatch.setattr(Added, name, [])
    trainer = make("run", 2, *LAYERS)
    trainer.fit()
    module = shared_tmp / "late_callback.py"
    if comm.rank == 0:
        module.write_text(LATE_CALLBACK)
    comm.barrier()
    words = [
        "--log.modules",
        str(module),
        "--steps",
        "2",
        "--all",
        "--config",
        str(shared_tmp / "run/config.toml"),
        "--json",
        str(shared_tmp / "p.json"),
    ]
    before = sorted((shared_tmp / "run").rglob("*"))
    main(words, comm)
    comm.barrier()
    out = capsys.readouterr().out
    if comm.rank:
        assert out == ""
    else:
        for said in (
            "2 blocks",
            "  blocks.0",
            "head and loss",
            "by rank",
            "what waits for what",
            "what to try",
            "full parameters",
        ):
            assert said in out
    saved = json.loads((shared_tmp / "p.json").read_text())
    assert not Added.sinks and min(Parts(**saved["parts"]).of("monitor", "own work")) > 0.05
    assert Parts(**saved["parts"]).step_s == saved["step_s"] and len(saved["memory"]) == 2
    assert before == sorted((shared_tmp / "run").rglob("*"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps.*at least 1"),
        (["--machine", "h10"], "did you mean h100"),
        (["--train.batch", "7"], "train.batch: expected a multiple of 2"),
        (["--model.sise", "small"], "model.sise"),
        (["--json", "/nowhere/p.json"], "No such file"),
        (["--data.path", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_the_same_error_on_all_ranks(comm: Communicator, words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, ValueError, OSError), match=said):
        main(words, comm)
