"""The lines in a run's heading about what its ranks send each other."""

from dataclasses import replace
from typing import Any

import pytest

from mpitrain.job.config import Config, ParallelConfig, TrainConfig
from mpitrain.job.record.heading import about_messages

LOCAL = {"copies": 2, "local_steps": 10, "exact_steps": 50}


@pytest.mark.parametrize(
    ("settings", "used", "line"),
    [
        ({}, {}, ""),
        ({"wire": "auto"}, {"wire": "fp32"}, "between nodes: gradients as fp32 (chosen by auto), weights as fp32"),
        (
            {"wire": "int8", "wire_weights": "auto"},
            {"wire_weights": "int8"},
            "between nodes: gradients as int8, weights as int8 (chosen by auto); what NCCL or CUDA-aware MPI sends is not encoded",
        ),
        ({"copies": 2}, {}, "2 copies of the model"),
        (LOCAL, {}, "2 copies of the model: 10 local steps, then an outer step (nesterov), after 50 exact steps"),
        ({"stage": 0, "compress": "power_sgd"}, {}, "gradients between copies: power_sgd of rank 4"),
        (
            {"stage": 0, "compress": "top_k", "compress_feedback": False, "exact_steps": 1},
            {},
            "gradients between copies: top_k of 1 % of the elements, without feedback, after 1 exact step",
        ),
    ],
)
def test_a_line_for_each_way_that_is_asked_for(settings: dict[str, Any], used: dict[str, Any], line: str) -> None:
    parallel = ParallelConfig(**settings)
    lines = about_messages(Config(parallel=parallel), replace(parallel, **used), num_nodes=2, on_gpus=True)
    assert lines == ([line] if line else [])


@pytest.mark.parametrize(
    ("parallel", "threads", "line"),
    [
        ({}, 1, "4 slices: the same bits at 1 to 4 ranks"),
        ({"pipeline": 2}, 3, "1 to 4 data ranks with 3 threads each; another number of threads changes bits"),
        (
            {"tensor": 2},
            2,
            "1 to 4 data ranks with parallel.tensor 2 and 2 threads each; another parallel.tensor or parallel.sequence or number "
            "of threads changes bits",
        ),
    ],
)
def test_slices_and_what_their_bits_depend_on(parallel: dict[str, Any], threads: int, line: str) -> None:
    config = Config(train=TrainConfig(slices=4, batch=8), parallel=ParallelConfig(**parallel))
    (said,) = about_messages(config, config.parallel, num_nodes=1, on_gpus=False, threads=threads)
    assert said.endswith(line)


def test_slices_and_an_evaluation() -> None:
    lines = [
        about_messages(
            Config(train=TrainConfig(slices=4, batch=8, eval_only=eval_only)),
            ParallelConfig(),
            num_nodes=1,
            on_gpus=False,
        )
        for eval_only in (False, True)
    ]
    assert lines == [["4 slices: the same bits at 1 to 4 ranks"], []]
