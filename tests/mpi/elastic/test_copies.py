"""Copies of a state in node memory: what is found is the newest whole state, and what is loaded is what was taken, bit for bit.

On one host the ranks of some tests are as on two nodes, each with a folder for its shared memory. On several hosts they use the hosts.
"""

import resource
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from checkpoints import tensors as tensors_of
from extent import FULL
from mpi4py import MPI
from ways import WAYS

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.job.elastic.copies.files import CopyFile, complete_copies, files_of, path_of, remove_copies
from mpitrain.job.elastic.copies.restoring import find_state
from mpitrain.job.elastic.copies.taking import StateCopies
from mpitrain.models import GPT, GPTConfig
from mpitrain.weights import state as weights
from mpitrain.weights.initial_values import initialize
from tests.mpi.sharding.test_state import OPTIMIZERS, assert_alike, sharded, snapshot, step

CASES = list(zip(WAYS, cycle(OPTIMIZERS)))


@pytest.fixture
def run(comm: Communicator) -> Iterator[str]:
    """The id of a run, of which no copies stay."""
    name: str = comm.broadcast_object(f"test{uuid4().hex[:8]}")
    yield name
    comm.barrier()
    remove_copies(name)
    comm.barrier()  # then each rank may remove its folders


@pytest.fixture
def nodes(
    comm: Communicator, two_nodes: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> Communicator:
    """All ranks, on several nodes."""
    if comm.size == 1:
        pytest.skip("one rank is on one node")
    if comm.num_nodes > 1:
        return comm
    folder = shared_tmp / f"node-{comm.rank % 2}"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(folder))
    comm.barrier()
    return two_nodes


def take(copies: StateCopies, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = weights.collect(model, optimizer, meta={"step": number})
    copies.take(number, state.tensors, state.meta)


def trained(comm: Communicator, way: str, optimizer: str, steps: int = 3) -> tuple:
    """A model and its optimizer after some steps."""
    model = sharded(0, comm, way)
    made = OPTIMIZERS[optimizer](model)
    for number in range(steps):
        step(model, made, number)
    return model, made


@pytest.mark.rest
@pytest.mark.parametrize(
    ("way", "optimizer"), CASES if FULL or MPI.COMM_WORLD.size == 2 else CASES[MPI.COMM_WORLD.size % 3 :: 3]
)
def test_a_state_comes_back_bit_for_bit(comm: Communicator, run: str, way: str, optimizer: str) -> None:
    assert find_state(comm, run) is None
    model, mine = trained(comm, way, optimizer)
    copies = StateCopies(comm, run, 1)
    take(copies, 2, model, mine)
    step(model, mine, 3)
    take(copies, 3, model, mine)
    expected = snapshot(model, mine)
    other = sharded(1, comm, way)
    others = OPTIMIZERS[optimizer](other)
    step(other, others, 7)
    for target, its in ((model, mine), (other, others)):
        step(target, its, 8)
        found = find_state(comm, run)
        assert found is not None and found.step == 3
        meta = weights.load(found, target, its)
        assert meta["step"] == 3
        assert_alike(snapshot(target, its), expected)
    comm.barrier()
    copies.close(remove=True)
    comm.barrier()
    assert list(complete_copies(run)) == []


@pytest.mark.parametrize("way", ["stage 1", "stage 2, private", "stage 3"])
def test_fewer_ranks_load_a_state(comm: Communicator, run: str, shared_tmp: Path, way: str) -> None:
    """The ranks without the first one, as after its loss: its copy is a file, which stays."""
    model, mine = trained(comm, way, "adamw")
    copies = StateCopies(comm, run, 1)
    take(copies, 3, model, mine)
    mpitrain.save(shared_tmp / "before", model, mine)
    copies.close(remove=False)
    if comm.size == 1:
        return
    left = comm.split(None if comm.rank == 0 else 0)
    if left is not None:
        other = sharded(1, left, way)
        others = OPTIMIZERS["adamw"](other)
        found = find_state(left, run)
        assert found is not None
        weights.load(found, other, others)
        mpitrain.save(shared_tmp / "after", other, others)
        left.free()
    comm.barrier()
    assert tensors_of(shared_tmp / "before") == tensors_of(shared_tmp / "after")


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_a_cut_model_is_loaded_in_another_layout(comm: Communicator, run: str, shared_tmp: Path) -> None:
    """tp=2, then all ranks shard the model, and back."""

    def model_of(tp: int, seed: int) -> tuple:
        mesh = mpitrain.mesh(comm, tp=tp)
        model = GPT(GPTConfig(vocab=50, context=8, width=12, layers=2, heads=2, tied=False))
        initialize(model, seed=seed)
        if tp > 1:
            mpitrain.tensor_parallel(model, mesh["tp"])
        mpitrain.fully_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(seed))
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    first = model_of(2, 1)
    mpitrain.save(shared_tmp / "0", *first)
    copies = StateCopies(comm, run, 1)
    take(copies, 10, *first)
    for number, tp in enumerate((1, 2), 1):
        state = model_of(tp, 2)
        found = find_state(comm, run)
        assert found is not None
        weights.load(found, *state)
        mpitrain.save(shared_tmp / str(number), *state)
        take(copies, 10 + number, *state)
    comm.barrier()
    assert tensors_of(shared_tmp / "0") == tensors_of(shared_tmp / "1") == tensors_of(shared_tmp / "2")
    copies.close(remove=True)


# Which state is found: of small arrays, whose elements are the step


def rows(comm: Communicator, value: float, num: int = 1000) -> dict[str, ckpt.Shard]:
    """This rank's rows of a tensor of `num` rows, and one that all ranks have."""
    low, high = (num * (comm.rank + i) // comm.size for i in (0, 1))
    return {
        "rows": ckpt.Shard(np.full((high - low, 3), float(value)), (num, 3), (low, 0)),
        "all": np.full(7, float(value)),
    }


def found_in(comm: Communicator, run: str) -> float | None:
    """The step of the newest state, after a look at all its elements."""
    state = find_state(comm, run)
    if state is None:
        return None
    wanted = rows(comm, -1.0)
    assert state.load(wanted, comm=comm)["note"] == "x" * state.step
    for array in (wanted["rows"].data, wanted["all"]):
        assert (array == state.step).all()
    return state.step


def take_rows(copies: StateCopies, comm: Communicator, step: int) -> None:
    copies.take(step, rows(comm, step), {"note": "x" * step})


def spoil(run: str, epoch: int, rank: int, generation: int) -> None:
    """Leave a copy as a rank does that dies while it writes."""
    file = CopyFile(path_of(run, epoch, rank, generation), 0, 0)
    file.begin()
    file.close()


@pytest.mark.one_node
def test_the_newest_whole_state_is_found(comm: Communicator, run: str) -> None:
    first = StateCopies(comm, run, 1)
    last = comm.rank == comm.size - 1
    for number, expected in ((10, 10), (20, 20), (30, 30)):
        take_rows(first, comm, number)
        comm.barrier()
        assert found_in(comm, run) == expected
        comm.barrier()
    if last:
        spoil(run, 1, comm.rank, 0)  # of step 30
    comm.barrier()
    assert found_in(comm, run) == 20
    comm.barrier()
    second = StateCopies(comm, run, 2)
    take_rows(second, comm, 15)
    comm.barrier()
    assert found_in(comm, run) == 15, "a later epoch wins: the run went back"
    comm.barrier()
    if last:
        spoil(run, 2, comm.rank, 0)
    comm.barrier()
    assert found_in(comm, run) == 20, "of the earlier epoch, whose copies stay until the second copy of the later one"
    comm.barrier()
    take_rows(second, comm, 25)
    comm.barrier()
    assert found_in(comm, run) == 25
    deadline = time.monotonic() + 10  # a thread removes those of the earlier epoch
    while (epochs := {path.name.split("-")[3] for path, _ in complete_copies(run)}) != {"00000002"}:
        assert time.monotonic() < deadline, epochs
        time.sleep(0.01)
    comm.barrier()
    if last:
        spoil(run, 2, comm.rank, 1)
    comm.barrier()
    assert found_in(comm, run) is None
    first.close(remove=False)
    second.close(remove=True)


@pytest.mark.one_node
def test_tensors_that_the_state_lacks_are_an_error(comm: Communicator, run: str) -> None:
    copies = StateCopies(comm, run, 1)
    take_rows(copies, comm, 1)
    comm.barrier()
    state = find_state(comm, run)
    assert state is not None
    with pytest.raises(ckpt.CheckpointError, match="the copies of step 1 in node memory have no tensor other"):
        state.load({"other": np.zeros(7)}, comm=comm)
    with pytest.raises(ckpt.CheckpointError, match=r"all is float64 \(7,\) there, float32 \(7,\) here"):
        state.load({"all": np.zeros(7, np.float32)}, comm=comm)
    copies.close(remove=True)


def num_files(comm: Communicator, run: str) -> int:
    """The number of files of copies on all nodes, the same on all ranks. Each takes its memory whether it is complete or not."""
    comm.barrier()
    paths = files_of(run) if comm.node.rank == 0 else ()
    return sum(comm.all_gather_object(len(list(paths))))


@pytest.mark.one_node
def test_after_a_loss_there_are_never_more_than_two_states(comm: Communicator, run: str) -> None:
    first = StateCopies(comm, run, 1)
    for number in (10, 20):
        take_rows(first, comm, number)
    two_states = num_files(comm, run)
    first.abandon()
    found = find_state(comm, run)
    assert found is not None
    found.remove_others()
    assert num_files(comm, run) == two_states // 2 and found_in(comm, run) == 20
    second = StateCopies(comm, run, 2)
    second.prepare(rows(comm, 21), {"note": "x" * 21})
    for number in (21, 22, 23):
        take_rows(second, comm, number)
        assert num_files(comm, run) == two_states and found_in(comm, run) == number
        comm.barrier()
    second.close(remove=True)
    assert num_files(comm, run) == 0


# Several nodes


def test_copies_that_are_on_one_node_alone_keep_the_older_ones(nodes: Communicator, run: str) -> None:
    """The loss of that node would take the newest state."""
    comm = nodes
    copies = StateCopies(comm, run, 1)
    for number in (10, 20):
        take_rows(copies, comm, number)
    copies.close(remove=False)
    before = num_files(comm, run)
    of_partner = next((found.path for found in complete_copies(run) if "p." in found.path.name), None)
    newest = [found.path for found in complete_copies(run) if found.path.name.endswith("p.1")]
    assert of_partner is not None and newest
    comm.barrier()
    if comm.rank == 0:
        spoiled = newest[0].read_bytes()
        newest[0].write_bytes(b"writing." + spoiled[8:])  # the transfer to the partner was under way
    for is_whole in (False, True):
        comm.barrier()
        found = find_state(comm, run)
        assert found is not None and found.step == 20
        found.remove_others()
        assert num_files(comm, run) == (before // 2 if is_whole else before)
        if comm.rank == 0 and not is_whole:
            newest[0].write_bytes(spoiled)
    assert found_in(comm, run) == 20


def node_numbers(comm: Communicator) -> list[int]:
    leaders = comm.all_gather_object(comm.node.broadcast_object(comm.rank))
    return [sorted(set(leaders)).index(leader) for leader in leaders]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_s_copies_come_from_its_partners(nodes: Communicator, run: str, shared_tmp: Path, lost: int) -> None:
    """All files of one node are removed. Then all ranks, as after a restart of the node, and those of the other node load the state."""
    comm = nodes
    mine, at = node_numbers(comm)[comm.rank], "stage 3, private"
    model, optimizer = trained(comm, at, "adamw")
    copies = StateCopies(comm, run, 1)
    for number in (4, 5, 6):
        step(model, optimizer, number)
        take(copies, number, model, optimizer)
    mpitrain.save(shared_tmp / "before", model, optimizer)
    expected = snapshot(model, optimizer)
    copies.close(remove=False)
    assert copies.link_bytes > 3 * sum(param.nbytes for param in model.parameters())
    comm.barrier()
    if mine == lost:
        remove_copies(run)
    comm.barrier()
    found = find_state(comm, run)
    assert found is not None and found.step == 6
    step(model, optimizer, 9)
    weights.load(found, model, optimizer)
    assert_alike(snapshot(model, optimizer), expected)
    left = comm.split(None if mine == lost else 0)
    if left is not None:
        other = sharded(1, left, at)
        others = OPTIMIZERS["adamw"](other)
        found = find_state(left, run)
        assert found is not None and found.step == 6
        weights.load(found, other, others)
        mpitrain.save(shared_tmp / "after", other, others)
        left.free()
    comm.barrier()
    assert tensors_of(shared_tmp / "before") == tensors_of(shared_tmp / "after")


def test_a_full_node_memory_is_an_error_on_all_ranks(comm: Communicator, run: str) -> None:
    last = comm.rank == comm.size - 1
    copies = StateCopies(comm, run, 1)
    with limited_files(1 << 16 if last else None), pytest.raises(OSError, match="copies of the state in node memory: "):
        take_rows(copies, comm, 1)
    copies.close(remove=True)
    comm.barrier()
    assert files_of(run) == []


def test_copies_that_are_whole_survive_a_full_node_memory(nodes: Communicator, run: str) -> None:
    """As after a loss, if the copies of the ranks that are left find no room beside those from which they have begun."""
    comm = nodes
    first = StateCopies(comm, run, 1)
    take_rows(first, comm, 10)
    first.close(remove=False)
    second = StateCopies(comm, run, 2)
    with (
        limited_files(1 << 16 if comm.rank == 0 else None),
        pytest.raises(OSError, match="copies of the state in node memory: "),
    ):
        take_rows(second, comm, 20)
    second.give_up()
    comm.barrier()
    found = find_state(comm, run)
    assert found is not None and found.step == 10
    assert num_files(comm, run) == 2 * comm.size, "each rank's own, and its partner's"


def test_a_partner_s_full_node_memory_is_an_error_on_all_ranks(nodes: Communicator, run: str) -> None:
    """The node of one rank has room for the rank's own small copy, but not for the large one that comes from another node."""
    comm = nodes
    small = comm.rank == 0

    def state(step: int) -> dict[str, ckpt.Shard]:
        size, begin = (8, 0) if small else (1 << 20, 8 + (comm.rank - 1 << 20))
        return {"x": ckpt.Shard(np.full(size, step, np.uint8), (8 + (comm.size - 1 << 20),), (begin,))}

    copies = StateCopies(comm, run, 1)
    with limited_files(1 << 19 if small else None):
        copies.take(1, state(1), {})
        with pytest.raises(OSError, match=r"copies of the state in node memory: .*\[rank 0 of"):
            copies.take(2, state(2), {})
    copies.close(remove=True)
    comm.barrier()
    assert files_of(run) == []


class limited_files:  # noqa: N801 - a context manager
    """No file of this process may be larger than `num_bytes`: the system refuses as it does where no room is left."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        if self._num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._num_bytes, self._before[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
