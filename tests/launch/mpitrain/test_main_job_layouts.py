"""The main job with tensor parallelism and with pipelines: its losses are those of ZeRO-3, over a stop, a resume, and a change of the
mesh."""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from extent import extent
from main_job import STEPS, heldout_losses, losses, metrics, train, trained

import ckpt
from mpitrain.view.diff.diff_command import main as diff

pytestmark = [pytest.mark.rest, pytest.mark.timeout_s(300)]

# Relative. The ranks add parts of products in another order. Measured over the 60 steps: up to 3e-7.
TOLERANCE = 1e-5


TENSOR = ("--parallel.tensor", "2")
PIPELINE = ("--parallel.pipeline", "2", "--parallel.schedule", "zb-h1", "--train.accumulate", "3")
# Each layout of four ranks, the axes of a matrix in its checkpoint, and layouts that go on from there. A full run has those that
# tests/mpi/tensor and tests/mpi/stages show, too.
LAYOUTS = {
    "tensor": (TENSOR, ("tp,dp_shard", None), [(4, TENSOR), (2, TENSOR), (4, ())]),
    "pipeline": (PIPELINE, ("dp_shard", None), [(4, PIPELINE), (2, ()), (4, TENSOR), (2, PIPELINE)]),
    "both": (
        (*TENSOR, *PIPELINE),
        ("tp", None),
        extent([(2, PIPELINE)], [(4, (*TENSOR, *PIPELINE)), (2, PIPELINE), (2, ())]),
    ),
}


@pytest.mark.parametrize("which", extent(["both"], list(LAYOUTS)))
def test_it_goes_on_with_other_meshes(
    corpus: Path, tmp_path: Path, whole_run: Callable[[int], Path], which: str
) -> None:
    folder, (layout, expected_axes, others) = tmp_path / "run", LAYOUTS[which]
    stopped = train(4, folder, corpus, *layout, when="step 5/", send=signal.SIGUSR1)
    assert stopped.returncode == 0, str(stopped)
    said = re.search(r"stopped after step (\d+) as asked", stopped.stdout)
    assert said is not None and 5 <= int(said[1]) < STEPS, str(stopped)
    start, zero = folder / f"checkpoints/step-{int(said[1]):08d}", whole_run(4)
    assert ckpt.open(start)["model/blocks.0.mlp.fc.weight"].axes == expected_axes
    for num_ranks, args in others:
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        resumed = trained(num_ranks, other, corpus, *args)
        assert f"goes on from {other}/checkpoints/{start.name}" in resumed.stdout, str(resumed)
        np.testing.assert_allclose(losses(other), losses(zero), rtol=TOLERANCE)
        np.testing.assert_allclose(heldout_losses(other), heldout_losses(zero), rtol=TOLERANCE)
        for line in metrics(other):
            assert "loss" not in line or 0 < line["comm_s"] < line["step_s"]
        shutil.rmtree(other)


def test_compressed_gradients_go_on_with_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    """Also with two micro-batches, which are compressed together, and over the end of the exact steps."""
    few = ("--train.steps", "6", "--train.eval-batches", "0", "--train.sample-bytes", "0", "--checkpoint.every", "3")
    args = (*few, "--parallel.stage", "0", "--parallel.compress", "power_sgd", "--parallel.exact-steps", "2",
            "--train.accumulate", "2")  # fmt: skip
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    trained(2, straight, corpus, *args)
    resumed.mkdir()
    shutil.copy(straight / "config.toml", resumed)
    shutil.copytree(straight / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    trained(2, resumed, corpus, *args)
    assert losses(straight)[3:] == [line["loss"] for line in metrics(resumed) if "loss" in line]
    same = ckpt.open(straight / "checkpoints/step-00000006"), ckpt.open(resumed / "checkpoints/step-00000006")
    assert set(same[0]) == set(same[1])
    for name in same[0]:
        assert np.array_equal(same[0][name][...], same[1][name][...]), name
    assert diff([str(straight), str(resumed), "--common"]) == 0, "the resumed run has no step 1 to 3"
    residual = same[0]["compression/residual/blocks.0.mlp.fc.weight"][...]
    assert residual.shape == (2, 128, 32) and residual.any()
