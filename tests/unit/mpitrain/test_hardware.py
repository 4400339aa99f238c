"""Which cores a rank gets, and the yardstick for its speed."""

import time
from collections.abc import Iterable

import pytest
import torch

from mpitrain.job.train import hardware
from mpitrain.job.train.hardware import cores_of_task, matmul_flops_per_s, of_job, share_out


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


NODE = set(range(64))


@pytest.mark.parametrize(
    ("allowed", "asked", "cores", "threads", "has_too_few"),
    [
        ([NODE] * 2, 0, range(32), 32, False),  # not in Slurm: the node is the job's
        ([NODE] * 2, 32, range(32), 32, False),
        ([NODE] * 2, 8, (), 8, False),  # nobody was bound, and other jobs may run on these cores
        ([NODE], 8, (), 8, False),
        ([{4, 5}, {6, 7}], 2, (4, 5), 2, False),  # bound by Slurm
        ([{4, 5, 6, 7}], 2, (4, 5, 6, 7), 4, False),  # bound to more, such as a socket
        ([{4, 5, 6, 7}] * 2, 2, (4, 5), 2, False),  # bound to the job's cores together
        ([{4}, {5}], 8, (4,), 1, True),  # srun was not told of --cpus-per-task
        ([{4}], 2, (4,), 1, True),
        ([{4}] * 2, 2, (), 1, True),
        ([{0, 1, 2, 3}] * 2, 4, (0, 1), 2, True),
    ],
)
def test_cores_of_a_job_of_slurm(
    allowed: list[set[int]], asked: int, cores: Iterable[int], threads: int, has_too_few: bool
) -> None:
    for by_srun in (True, False):
        its, num, problem = of_job(allowed, 0, asked, on_host=64, by_srun=by_srun)
        assert (its, num) == (tuple(cores), threads)
        assert bool(problem) == has_too_few
        if has_too_few:
            assert f"the job has {asked} cores for each task" in problem and f"run on {threads}:" in problem
            assert ("SRUN_CPUS_PER_TASK" in problem) == by_srun
            assert ("more ranks on the node than tasks" in problem) == (not by_srun)


def test_slurm_says_how_many_cores_a_rank_has() -> None:
    said = ({}, {"SLURM_CPUS_PER_TASK": ""}, {"SLURM_CPUS_PER_TASK": "8"}, {"SLURM_CPUS_PER_TASK": "many"})
    assert [cores_of_task(each) for each in said] == [0, 0, 8, 0]


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
