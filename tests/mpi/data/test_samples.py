"""`mpitrain.data.batches` on real ranks: the batches of one rank, over a checkpoint, with workers, and errors on all ranks."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_samples import Deadly, Numbers, Stream, WorkerStream
from torchdata.stateful_dataloader import StatefulDataLoader

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.job.data import batches

BATCH, STEPS = 6, 9

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 beside torch 2.13


def whole(batch: Any, comm: Communicator) -> list[list[float]]:
    """The rows of all ranks, in order."""
    return torch.cat(comm.all_gather_object(torch.stack([each.double() for each in batch], 1))).tolist()


def first(num: int, made: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(made, num))


@pytest.mark.parametrize("dataset", [Numbers(20), Stream(20)], ids=["map", "stream"])
def test_the_batches_of_one_rank_go_on_from_a_checkpoint(
    dataset: Dataset[Any], comm: Communicator, shared_tmp: Path
) -> None:
    """On other numbers of ranks: all, one alone, and all along an axis of a mesh that has two ranks for the same rows."""
    itself = comm.split(comm.rank)
    alone = [whole(batch, itself) for batch in first(STEPS, batches(dataset, itself, batch=BATCH, seed=5))]
    model = torch.nn.Linear(2, 2)
    made = batches(dataset, comm, batch=BATCH, seed=5)
    assert [whole(batch, comm) for batch in first(3, made)] == alone[:3]
    mpitrain.save(shared_tmp / "a", model, meta={"data": made.state_dict()}, comm=comm)
    meta = mpitrain.load(shared_tmp / "a", model, comm=comm)
    groups = [itself, comm]
    if comm.size % 2 == 0:
        mesh = Mesh(comm, {"dp_shard": comm.size // 2, "tp": 2})
        groups.append(mesh["dp_shard"])
        assert [whole(batch, groups[-1]) for batch in first(3, batches(dataset, mesh, batch=BATCH, seed=5))] == alone[
            :3
        ]
    for group in groups:
        resumed = batches(dataset, group, batch=BATCH, seed=5)
        resumed.load_state_dict(meta["data"])
        assert [whole(batch, group) for batch in first(STEPS - 3, resumed)] == alone[3:]
        assert resumed.step == STEPS
    with pytest.raises(ValueError, match="saved with seed 5, got 6: the samples would be others"):
        batches(dataset, comm, batch=BATCH, seed=6).load_state_dict(meta["data"])
    itself.free()


class Read(Numbers):
    """Numbers that keep the places that were read."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Read, Stream])
def test_each_rank_reads_its_own_slices(kind: type[Any], comm: Communicator) -> None:
    count, batch = 4, 8
    itself = comm.split(comm.rank)
    alone = [torch.stack(each, 1) for each in first(STEPS, batches(kind(30), itself, batch=batch, seed=5))]
    dataset = kind(30)
    made = batches(dataset, comm, batch=batch, seed=5, slices=count)
    model = mpitrain.fully_shard(torch.nn.Linear(2, 2), comm, slices=count)
    for step in range(STEPS):
        if step == 4:  # the state is the same with and without slices
            state = made.state_dict()
            made = batches(dataset, comm, batch=batch, seed=5, slices=count)
            made.load_state_dict(state)
        its, rounds = next(made), list(mpitrain.rounds(model))
        assert len(its) == len(rounds)
        for (number, _), of_slice in zip(rounds, its, strict=True):
            assert torch.equal(torch.stack(of_slice, 1), alone[step][2 * number : 2 * number + 2])
    if isinstance(dataset, Read):
        num_own = sum(counts for _, counts in mpitrain.rounds(model))
        assert len(dataset.read) == STEPS * num_own * batch // count, "and no others"
    for slices in (6, 16, 1 if comm.size > 1 else 3):
        with pytest.raises(ValueError, match=f"expected a power of two that divides batch=8, .*got {slices}"):
            batches(dataset, comm, batch=batch, slices=slices)
    itself.free()


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_workers_are_plain_programs_that_make_the_same_batches(comm: Communicator) -> None:
    expected = [whole(batch, comm) for batch in first(5, batches(Stream(7), comm, batch=2))]
    state = torch.get_rng_state()
    made = first(5, batches(WorkerStream(7), comm, batch=2, workers=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [whole(batch[:4], comm) for batch in made] == expected
    assert [(ranks.tolist(), has_mpi.tolist()) for *_, ranks, has_mpi in made] == [([-1], [False])] * 5


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_killed_worker_is_an_error_on_all_ranks(comm: Communicator) -> None:
    made = batches(Deadly(8), comm, batch=2, shuffle=False, workers=1)
    with pytest.raises(RuntimeError, match=r"a worker process has died: .*killed by signal: Killed.*\[rank 0 of 2\]"):
        next(made)


def loader(comm: Communicator, **options: Any) -> StatefulDataLoader:
    """As for DistributedDataParallel: an epoch is three batches of two samples."""
    dataset = Numbers(5 * comm.size)
    sampler = DistributedSampler(dataset, comm.size, comm.rank, seed=3)
    return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, **options)


def test_the_state_of_a_loader_goes_on_at_the_same_number_of_ranks(comm: Communicator) -> None:
    """After each step, also after the last one of an epoch."""
    numbers = [batch[0].tolist() for batch in first(8, batches(loader(comm), comm))]
    epochs = [sorted(itertools.chain(*numbers[at : at + 3])) for at in (0, 3)]
    assert [sorted(itertools.chain(*comm.all_gather_object(epoch))) for epoch in epochs] == [
        list(range(5 * comm.size))
    ] * 2
    assert numbers[:3] != numbers[3:6]
    made = batches(loader(comm), comm)
    for step in range(8):
        assert next(made)[0].tolist() == numbers[step], step
        state = json.loads(json.dumps(made.state_dict()))
        made = batches(loader(comm), comm)
        made.load_state_dict(state)
        assert made.step == step + 1
    state["ranks"].append(state["ranks"][0])
    words = f"is of {comm.size + 1} data ranks, got {comm.size}: .* start {comm.size + 1}, or pass the dataset"
    with pytest.raises(ValueError, match=words):
        made.load_state_dict(state)
    with pytest.raises(ValueError, match="expected the state of a StatefulDataLoader, got one of the kind 'map'"):
        made.load_state_dict(batches(Numbers(4), comm, batch=4).state_dict())


def test_what_is_refused_is_refused_on_all_ranks(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="forks its 1 workers, and forked workers crash under MPI"):
        batches(loader(comm, num_workers=1, multiprocessing_context="fork"), comm)
    with pytest.raises(TypeError, match="no state that a checkpoint can keep; pass its dataset"):
        batches(DataLoader(Numbers(3)), comm)
    with pytest.raises(ValueError, match=f"at least one sample for each of {comm.size} ranks, got {comm.size - 1}"):
        batches(Numbers(3), comm, batch=comm.size - 1)
    with pytest.raises(ValueError, match="workers=0 or 1 for an iterable dataset"):
        batches(Stream(3), comm, batch=4, workers=2)
    with pytest.raises(TypeError, match="cannot be pickled"):
        next(batches(Numbers(3), comm, batch=4, workers=1, collate=lambda samples: samples))
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"expected the same dataset on all ranks, got the lengths \[4, 5"):
            batches(Numbers(4 + comm.rank), comm, batch=4)
    bad_on_one = [None if comm.rank == comm.size - 1 else 0] * 4
    with pytest.raises(TypeError, match="NoneType"):
        next(batches(bad_on_one, comm, batch=4))
