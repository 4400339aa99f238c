"""Which cores a rank gets, and the yardstick for its speed."""

import time

import pytest
import torch

from mpitrain.train import hardware
from mpitrain.train.hardware import matmul_flops_per_s, share_out


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], [(0, 1), (2, 3)]),  # nobody was bound: dealt out
        ([{4, 6, 8}] * 2, [(4,), (6,)]),  # one is left over
        ([{0, 2}, {1, 3}], [(0, 2), (1, 3)]),  # the launcher has decided
        ([{0}, {0}, {0}], [(), (), ()]),  # fewer cores than ranks: nobody has one of its own
        ([{0, 1}, {1, 2}], [(0,), (1,)]),  # overlapping masks decide nothing
        ([{5}], [(5,)]),
    ],
)
def test_cores_are_shared_out(allowed: list[set[int]], expected: list[tuple[int, ...]]) -> None:
    assert [share_out(allowed, rank) for rank in range(len(allowed))] == expected


def test_the_yardstick_leaves_the_random_generator_alone() -> None:
    # A checkpoint keeps its state: a resumed run, which measures once more, would end with another.
    before = torch.get_rng_state()
    assert matmul_flops_per_s(torch.device("cpu"), torch.float32) > 1e6
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fast", ["mm", "product"])
def test_the_yardstick_is_the_faster_library(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is the one of the products of cut matrices: else a model that is cut would use more than all of the peak."""
    monkeypatch.setattr(torch, "mm", lambda a, b: time.sleep(0 if fast == "mm" else 0.01))
    monkeypatch.setattr(hardware, "product", lambda a, b: time.sleep(0 if fast == "product" else 0.01))
    assert matmul_flops_per_s(torch.device("cpu"), torch.float32) > 2 * 1024**3 / 0.01
