"""A stage that fails or hangs: all ranks end, and the report says where each micro-batch was. Real jobs."""

import re

import pytest
from launching import ROOT, Result, launch, without_names

pytestmark = pytest.mark.rest

SCRIPT = """
import time, torch, collectives
from mpitrain.models import GPT, GPTConfig
from mpitrain.stages import pipeline

comm = collectives.world()
torch.manual_seed(0)
model = GPT(GPTConfig(vocab=50, context=16, width=24, layers=4, heads=2, tied=False))
pipe = pipeline(model, comm, "{schedule}", micro_batches=4)
tokens = [torch.randint(0, 50, (1, 8)) for _ in range(4)]
last = [{{"targets_BL": rows}} for rows in tokens]

def step(**more):
    return pipe.step(tokens, last=last, **more)

step()
{failure}
step()
"""


def job(schedule: str, failure: str, **env: str) -> Result:
    script = SCRIPT.format(schedule=schedule, failure=failure)
    return launch(2, "-c", script, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **env}, timeout_s=40)


IN_A_FORWARD = """
calls = []
def fail(*args):
    calls.append(0)
    if len(calls) == 2:
        raise torch.cuda.OutOfMemoryError("no memory")
if comm.rank == 1:
    [*model.blocks.children()][-1].register_forward_hook(fail)
"""
IN_A_BACKWARD = """
if comm.rank == 0:
    def fail(grad):
        raise ZeroDivisionError("in a hook")
    model.wpe.weight.register_hook(fail)
"""
IN_THE_LOSS = """
def loss_of(output, micro):
    if micro == 3:
        raise KeyError("label")
    return output
step(loss_of=loss_of)
"""

CASES = [
    (
        "1f1b",
        IN_A_FORWARD,
        "torch.OutOfMemoryError: no memory",
        "the forward of stage 1, micro-batch 1 (action 3 of 8)",
        ["stage 1: 0 done, 1 in the forward, 2 to 3 not begun"],
        "rank 0: .*, in the wait for the gradient of the input of stage 1, micro-batch 1, from rank 1 of the pipeline, ",
    ),
    (
        "zb-h1",
        IN_A_BACKWARD,
        "ZeroDivisionError: in a hook",
        "the gradient of the input of stage 0, micro-batch 0 (action 3 of 12)",
        ["stage 0: 0 in the gradient of the input, 1 after the forward, 2 to 3 not begun"],
        "rank 1: .*, in the wait for the output of stage 0, micro-batch 2, from rank 0 of the pipeline, ",
    ),
    (
        "zb-v",
        IN_THE_LOSS,
        "KeyError: 'label'",
        r"the forward of stage 3, micro-batch 3 (action 18 of 24)",
        ["stage 0: ", "stage 3: 0 to 2 done, 3 in the forward"],
        "rank 1: .*, in the wait for the (output|gradient of the input) of stage ., micro-batch 3, from rank 0 of the pipeline, ",
    ),
]


@pytest.mark.parametrize(("schedule", "failure", "error", "action", "stages", "other"), CASES)
def test_an_error_on_one_stage(
    schedule: str, failure: str, error: str, action: str, stages: list[str], other: str
) -> None:
    result = job(schedule, failure)
    assert result.returncode == 1, str(result)
    rank = 1 - int(other[5])
    assert f"[rank {rank}] {error}" in result.stderr, str(result)
    assert f"[rank {rank}] pipeline: an error in {action}; the micro-batches of this rank's stages:" in result.stderr, (
        str(result)
    )
    for stage in stages:
        assert f"[rank {rank}]   {stage}" in result.stderr, str(result)
    assert re.search(
        rf"\[rank {rank}\] the other ranks when rank {rank} failed:\n\[rank {rank}\]   {other}",
        without_names(result.stderr),
    ), str(result)
    assert result.seconds < 20


def test_a_stage_that_hangs_is_named() -> None:
    failure = (
        "if comm.rank == 1:\n    [*model.blocks.children()][-1].register_forward_hook(lambda *_: time.sleep(60))\n"
    )
    result = job("1f1b", failure, MPITRAIN_DEADLINE_S="2")
    assert result.returncode == 124, str(result)
    assert re.search(
        r"rank 0: in .*, in the wait for the gradient of the input of stage 1, micro-batch 0, from rank 1 of the pipeline, "
        r"at <string>:14 in step",
        without_names(result.stderr),
    ), str(result)
    assert re.search(
        r"rank 1: in no operation, in the forward of stage 1, micro-batch 0 \(action 1 of 8\), main thread at <string>",
        without_names(result.stderr),
    ), str(result)


def test_an_error_of_all_ranks_stays_an_ordinary_error() -> None:
    failure = """
for wrong in (tokens[:3], [None] * 4, tokens[:comm.rank + 3]):
    try:
        pipe.step(wrong)
    except (ValueError, TypeError) as error:
        if comm.rank == 0:
            print(error, flush=True)
"""
    result = job("1f1b", failure)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("step: expected 4 micro-batches, got 3") == 2, str(result)
    assert "expected a tensor, a sequence or a mapping for each micro-batch, got NoneType" in result.stdout, str(result)
