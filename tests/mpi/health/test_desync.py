"""Copies that differ are found at the next check: all ranks raise the same error, which names the rank, the tensor and the element."""

import math
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_events import faults
from small_trainers import Make, flip, in_step, maker

from collectives import Communicator
from mpitrain.job.elastic.copies.files import complete_copies
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.health import DesyncError
from mpitrain.job.train.trainer import Trainer
from mpitrain.sharding import sharded_params

NORM = "ln_f.weight"
CHECKED = ("--train.check-every", "4")


def params(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    return dict(trainer.model.named_parameters())


def failure_of(trainer: Trainer) -> str:
    """The error of the run, which is the same on all ranks."""
    with pytest.raises(DesyncError) as caught:
        trainer.fit()
    said = str(caught.value)
    assert trainer.comm.all_gather_object(said) == [said] * trainer.comm.size
    return said


def optimizer_state(trainer: Trainer, name: str, key: str) -> torch.Tensor:
    value: torch.Tensor = trainer.optimizer.state[params(trainer)[name]][key]
    return value


LAYOUTS = [
    pytest.param(("--parallel.stage", "0"), marks=pytest.mark.ranks(2, 3, 4), id="stage 0"),
    pytest.param(("--parallel.copies", "2"), marks=pytest.mark.ranks(2, 4), id="copies of shards"),
    pytest.param(
        ("--parallel.copies", "2", "--parallel.storage", "private"), marks=pytest.mark.ranks(4), id="copies, private"
    ),
    pytest.param(("--parallel.tensor", "2"), marks=pytest.mark.ranks(2, 4), id="tensor"),
    pytest.param(
        ("--parallel.tensor", "2", "--parallel.stage", "2", "--parallel.storage", "private"),
        marks=pytest.mark.ranks(4),
        id="tensor, stage 2",
    ),
]


@pytest.mark.rest
@pytest.mark.parametrize("what", ["parameter", "exp_avg"])
@pytest.mark.parametrize("args", LAYOUTS)
def test_a_bit_of_a_copy_flips_in_any_step(comm: Communicator, make: Make, args: tuple[str, ...], what: str) -> None:
    trainer = make("run", 8, *CHECKED, *args)
    name = NORM
    # the last rank that has an element of this parameter
    have = [rank for rank, count in enumerate(comm.all_gather_object(params(trainer)[name].numel())) if count]
    wrong = have[-1]

    def act() -> None:
        if comm.rank == wrong:
            flip(params(trainer)[name] if what == "parameter" else optimizer_state(trainer, name, what))

    in_step(trainer, 2, act)
    said = failure_of(trainer)
    label = f"model/{name}" if what == "parameter" else f"optimizer/{what}/{name}"
    assert said.startswith("step 4: ") and label in said and f"rank {wrong} on {platform.node()}" in said, said
    assert re.search(r"First difference: [\w/. ]+\[\d+(, \d+)*\] is \S+ on rank \d and \S+ on rank \d", said), said
    num_copies = comm.size if "stage 0" in " ".join(args).replace("--parallel.stage 0", "stage 0") else 2
    is_clear = "from the majority" in said
    assert is_clear == (num_copies > 2), said
    event = faults(trainer.run.folder)[-1]
    assert event["event"] == "desync" and wrong in event["ranks"] and platform.node() in event["hosts"]
    assert event["rank"] == (wrong if is_clear else None)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_bit_flips_in_a_full_copy_beside_the_shards(comm: Communicator, make: Make, stage: str) -> None:
    """The gradients of this step are wrong, and no optimizer has used them yet."""
    trainer = make("run", 8, *CHECKED, "--parallel.stage", stage, "--parallel.storage", "private")
    wrong = comm.size - 1

    def act() -> None:
        if comm.rank == wrong:
            param = next(param for param in sharded_params(trainer.model) if param.box.shape != param.box.full_shape)
            foreign = 0 if param.box.offset[0] else param.full.numel() - 1  # an element that another rank updates
            flip(param.full, foreign)

    in_step(trainer, 4, act)
    said = failure_of(trainer)
    assert "copy of model/" in said and f"rank {wrong} on" in said, said
    assert ("from the majority" in said) == (comm.size > 2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("value", "step"), [(1e6, 40), (math.nan, 3)])
def test_a_gradient_that_changes_on_one_rank(comm: Communicator, make: Make, value: float, step: int) -> None:
    """In stage 0 each rank has all gradients, and would take a step of its own, or none."""
    trainer = make("run", 42, "--train.check-every", "100", "--parallel.stage", "0")

    def act() -> None:
        if comm.rank == 1:
            gradient = params(trainer)[NORM].grad
            assert gradient is not None
            gradient[3] = value

    in_step(trainer, step, act)
    said = failure_of(trainer)
    assert said.startswith(f"step {step}: ") and "the gradient norm" in said and "rank 1 on" in said, said


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bit_flips_in_the_copy_of_a_node(
    two_nodes: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Each node has one copy in shared memory. In it the other node's rows change."""
    comm = two_nodes
    trainer = maker(comm, shared_tmp, monkeypatch)("run", 8, *CHECKED, "--parallel.param-dtype", dtype)
    on_wrong_node = comm.all_gather_object(comm.rank % 2 == 1)

    def act() -> None:
        # the first rank's rows, in the memory of the second node
        param = next(param for param in sharded_params(trainer.model) if len(param.full) > comm.size)
        comm.barrier()
        if comm.rank == 1:
            param.full.detach().view(-1).view(torch.int16)[0] ^= 1
        comm.barrier()

    in_step(trainer, 4, act)
    said = failure_of(trainer)
    named = [rank for rank in range(comm.size) if f"rank {rank} on" in said]
    assert "copy of model/" in said and any(on_wrong_node[rank] for rank in named) and len(named) == 2, said


def change_numbers(trainer: Trainer, what: str) -> None:
    if what == "the position in the data":
        trainer.batches.train.leave_out([(10**9, 10**9 + 12)])
    elif what == "the optimizer's settings":
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.2
    elif what == "the stepper":
        trainer.stepper.num_skipped += 1
    else:
        torch.rand(1)


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "what", ["the position in the data", "the optimizer's settings", "the stepper", "torch's generator"]
)
def test_numbers_that_all_ranks_share(comm: Communicator, make: Make, what: str) -> None:
    trainer = make("run", 8, *CHECKED, "--parallel.tensor", "2")

    def act() -> None:
        if comm.rank == 1:
            change_numbers(trainer, what)

    in_step(trainer, 3, act)
    said = failure_of(trainer)
    assert what in said and "rank 1 on" in said, said


@pytest.mark.ranks(2, 4)
def test_a_bit_that_makes_the_loss_infinite_is_found_before_the_loss_is_an_error(
    comm: Communicator, make: Make
) -> None:
    trainer = make("run", 8, "--train.check-every", "100", "--parallel.stage", "0")

    def act() -> None:
        if comm.rank == 1:
            params(trainer)[NORM].data.fill_(math.nan)

    in_step(trainer, 2, act)
    said = failure_of(trainer)
    assert said.startswith("step 3: ") and "rank 1 on" in said, said


CLEAN = [
    (), ("--parallel.stage", "1"), ("--parallel.storage", "private"), ("--parallel.copies", "2"),
    ("--parallel.pipeline", "2", "--train.accumulate", "3", "--model.layers", "2"),
    ("--parallel.param-dtype", "bfloat16"),
    ("--parallel.stage", "2", "--parallel.storage", "private", "--parallel.param-dtype", "bfloat16"),
    ("--model.heads", "3", "--model.width", "33", "--parallel.tensor", "2", "--parallel.sequence", "false"),
]  # fmt: skip
CLEAN_ON_4 = [
    ("--model.heads", "3", "--model.width", "33", "--parallel.tensor", "2", "--parallel.sequence", "false"),
    ("--parallel.pipeline", "2", "--parallel.tensor", "2", "--train.accumulate", "2", "--model.layers", "2"),
    ("--parallel.copies", "2", "--parallel.stage", "2", "--parallel.storage", "private"),
]


@pytest.mark.rest
@pytest.mark.parametrize(
    "args",
    [
        *(pytest.param(args, marks=pytest.mark.ranks(2), id=" ".join(args)) for args in CLEAN),
        *(pytest.param(args, marks=pytest.mark.ranks(4), id=" ".join(args)) for args in CLEAN_ON_4),
    ],
)
def test_no_false_alarm(make: Make, args: tuple[str, ...]) -> None:
    trainer = make("run", 12, "--train.check-every", "2", *args)
    trainer.fit()
    assert faults(trainer.run.folder) == []
    compared: list[Any] = trainer.health._replicas._plan
    has_copies = any(arg in ("--parallel.copies", "--parallel.tensor", "--parallel.pipeline") for arg in args)
    assert bool([its for its in compared if its.rows.name.startswith("model/")]) == has_copies


@pytest.mark.ranks(2, 3)
def test_copies_in_node_memory_are_removed_because_they_may_have_the_wrong_bits(comm: Communicator, make: Make) -> None:
    args = ("--parallel.stage", "0", "--train.elastic", "true", "--train.copy-every", "3", "--train.check-every", "4")
    trainer = make("run", 12, *args)
    there: list[bool] = []

    def act() -> None:
        comm.barrier()
        lease = read_lease(trainer.run.folder)
        there.append(lease is not None and bool(list(complete_copies(lease.run))))
        comm.barrier()
        if comm.rank == 0:
            flip(next(iter(trainer.model.parameters())))

    in_step(trainer, 7, act)
    with pytest.raises(DesyncError):
        trainer.fit()
    comm.barrier()
    lease = read_lease(trainer.run.folder)
    assert there == [True] and lease is not None and list(complete_copies(lease.run)) == []
