"""`plan --compare` runs all layouts on these ranks. How good the predictions are is not asserted: machines of tests are busy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from collectives import Communicator
from mpitrain.cli import main
from mpitrain.job.record.machine.machine import load
from mpitrain.tools.plan.comparing import compare_command
from mpitrain.tools.plan.comparing.cases import layouts
from mpitrain.tools.plan.comparing.results import ComparisonLaunch
from mpitrain.tools.plan.measuring import measure_command
from mpitrain.tools.plan.measuring.measure_command import measure_into
from mpitrain.tools.plan.measuring.small_gpt import GptSize, config_of
from mpitrain.tools.plan.measuring.steps import TrainedSteps

SMALL = GptSize(width=32, layers=4, heads=2, context=16, batch=16)


@pytest.mark.ranks(2)
@pytest.mark.timeout_s(240)
def test_measure_and_compare(comm: Communicator, shared_tmp: Path) -> None:
    machine, figures = str(shared_tmp / "here.toml"), str(shared_tmp / "figures.json")
    measure_into(machine, comm, threads=1, seconds=0.1)
    numbers = [f"--{name}={getattr(SMALL, name)}" for name in ("width", "layers", "heads", "context", "batch")]
    words = ["plan", "--compare", machine, *numbers, "--steps=1", "--threads=1", "--json", figures]
    assert main(words) == 0
    comm.barrier()
    launch = ComparisonLaunch.read(figures)
    assert [row.name for row in launch.rows] == list(layouts(comm.size, SMALL.batch))
    assert all(row.predicted_s > 0 and 0 < row.fastest_s <= row.measured_s for row in launch.rows)
    assert load(machine).kernels is not None and load(machine).links is not None


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.timeout_s(240)
def test_the_layouts_train_the_same_model(comm: Communicator) -> None:
    """Layouts whose ranks have the same tokens compute gradients of the same norm."""
    machine = replace(load("h100"), element_bytes=4, shares_memory=True)
    norms = []
    for name, layout in layouts(2, SMALL.batch).items():
        if layout.data == 1:
            steps = TrainedSteps(config_of(SMALL, layout, machine), comm, torch.device("cpu"))
            assert steps.turn(0)["step"] > 0
            norms.append((name, steps.grad_norm))
    assert len(norms) >= 10
    assert all(norm == pytest.approx(norms[0][1], rel=1e-4) for _, norm in norms), norms


@pytest.mark.ranks(2)
def test_wrong_arguments_are_one_error(comm: Communicator) -> None:
    for words, message in (
        (["--measure"], "plan: argument --measure: expected one argument"),
        (["--measure", "/nowhere/x.toml", "--seconds", "-1"], "plan: argument --seconds"),
        (["--compare", "h10"], "unknown machine 'h10': did you mean h100?"),
        (["--compare", "h100", "--batch", "6"], "a batch that is a multiple of 8, got 2 and 6"),
    ):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            (measure_command if "--measure" in words else compare_command).main(words, comm)
