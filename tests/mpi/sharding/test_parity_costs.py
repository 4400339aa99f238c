"""What a step of a sharded model costs besides numbers: collectives, the memory of frozen parameters. And compiled blocks."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from extent import extent
from parity_models import CASES, gpt, language_loss, low_rank_gpt
from sharded_models import STORAGES, mine
from torch._dynamo.testing import CompileCounterWithBackend

from collectives import Communicator
from collectives.diagnosis.record import last_operations
from mpitrain.sharding import fully_shard
from mpitrain.sharding.module import units_of
from mpitrain.sharding.unit.layout import rows_of

pytestmark = pytest.mark.ranks(1, 2)

NUM_UNITS = 3  # of the GPT: two blocks and the rest


def collectives_of(call: Callable[[], object]) -> Counter[str]:
    """How many of each kind the flight record shows for a call."""
    before = max((operation.number for operation in last_operations()), default=-1)
    call()
    return Counter(operation.name for operation in last_operations() if operation.number > before)


@pytest.mark.one_node
@pytest.mark.parametrize("checkpointed", [False, True])
def test_collectives_of_a_step(comm: Communicator, checkpointed: bool) -> None:
    """Resident: 3 fences, a reduction for each unit, one message about unused parameters. Private: gathers instead of fences."""
    if comm.size == 1:
        pytest.skip("one rank exchanges nothing")
    name = "checkpointed" if checkpointed else "gpt, tied"
    loss = CASES[name].loss
    for storage in STORAGES:
        model = fully_shard(CASES[name].make(), comm, storage=storage)
        fences = {"barrier": 3} if storage == "resident" else {}
        for step in range(2):
            if step:  # the first forward also sends the buffers and allocates
                # Each unit before its forward; the blocks again before their backward: the outermost stays.
                gathers = {"all_gather": NUM_UNITS + NUM_UNITS - 1} if storage == "private" else {}
                counts = collectives_of(lambda m=model, s=step: loss(m, s, mine(comm)).backward())
                assert counts == {"reduce_scatter": NUM_UNITS, "all_reduce": 1} | fences | gathers
            else:
                loss(model, step, mine(comm)).backward()
        with torch.no_grad():
            counts = collectives_of(lambda m=model: loss(m, 0, mine(comm)))
        # Private: the ranks compare what they gathered.
        evaluation = {"barrier": 2} if storage == "resident" else {"all_gather": NUM_UNITS, "all_reduce": 1}
        assert counts == evaluation


@pytest.mark.parametrize("storage", STORAGES)
def test_accumulation_without_sync_reduces_once(comm: Communicator, storage: str) -> None:
    model = fully_shard(gpt(tied=True), comm, storage=storage)
    counts: Counter[str] = Counter()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        counts += collectives_of(lambda s=step: language_loss(model, s, mine(comm)).backward())
    assert counts["reduce_scatter"] == (NUM_UNITS if comm.size > 1 else 0)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_frozen_costs_neither_gradients_nor_reductions(comm: Communicator, storage: str) -> None:
    model = fully_shard(low_rank_gpt(), comm, storage=storage)
    units = [flat for unit in units_of(model) for flat in unit.flats]
    trained = [unit for unit in units if unit.gradients]
    assert len(trained) == 2 and len(units) == 5  # of each block the differences and the rest; all of the rest
    language_loss(model, 0, mine(comm)).backward()
    counts = collectives_of(lambda: language_loss(model, 1, mine(comm)).backward())
    assert counts["reduce_scatter"] == (2 if comm.size > 1 else 0)
    for unit in units:
        for param in unit.params:
            assert param.full.grad is None
            assert (param.shard.grad is not None) == bool(unit.gradients)
    buffers = [buffer for of_dtype in model._step.reducer._buffers.values() for buffer in of_dtype]
    expected = [max(unit.layout.numel for unit in trained)] * min(len(trained), 2)
    assert [buffer.numel() for buffer in buffers] == (expected if comm.size > 1 else [])


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at it, and hides that
@pytest.mark.parametrize(
    ("in_place", "storage"),
    extent([(True, "private"), (False, "resident")], [*itertools.product([True, False], STORAGES)]),
)
def test_compiled_blocks(comm: Communicator, in_place: bool, storage: str) -> None:
    """Compiled before they are sharded: the compiled code takes the full parameters, as the plain code does, in each step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    model = gpt(tied=True)
    plain = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=counter)
        else:
            model.blocks[index] = torch.compile(block, backend=counter)
    for block in model.blocks:
        fully_shard(block, comm, storage=storage)
    fully_shard(model, comm, storage=storage)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4, fused=True) for m in (model, plain)]
    compiled = 0
    for step in range(3):
        language_loss(model, step, mine(comm)).backward()
        language_loss(plain, step, slice(None)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compiled = compiled or counter.frame_count
        assert counter.frame_count == compiled > 0  # and not again in later steps
    # By their order: a module that torch.compile returned gives its parameters other names.
    for shard, full in zip(model.parameters(), plain.parameters(), strict=True):
        want = rows_of(full.detach(), shard.shard_box)
        torch.testing.assert_close(shard.detach(), want, rtol=1e-3, atol=1e-4)
