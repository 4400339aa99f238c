"""Batches of torch's datasets: the rows of the ranks of a global batch, and samples in tar files."""

import gzip
import pickle
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch_samples import Numbers, Stream, number_and_text, pairs

from mpitrain.job.data import TarSamples
from mpitrain.job.data.documents import DamagedSampleError
from mpitrain.job.data.samples.randomness import generators_kept, seed_generators
from mpitrain.job.data.samples.rows import IterableRows, MapRows, SamplePlace, SampleRows, Share
from mpitrain.job.data.samples.workers import check_start

BEGIN = SamplePlace(0, 0)
BATCH, STEPS = 7, 12  # several epochs of 23 samples, which 7 does not divide


def rows_of(dataset: Any, size: int, rank: int, seed: int = 3) -> SampleRows:
    share = Share(BATCH, ((BATCH * rank // size, BATCH * (rank + 1) // size),))
    if isinstance(dataset, Stream):
        return IterableRows(dataset, share, seed=seed, collate=list)
    return MapRows(dataset, share, seed=seed, collate=list, is_shuffled=True)


def taken(
    dataset: Any, size: int, place: SamplePlace = BEGIN, steps: int = STEPS
) -> tuple[list[list[Any]], list[SamplePlace]]:
    """The global batches of so many ranks, and the place after each."""
    parts, places = [], []
    for rank in range(size):
        rows = rows_of(dataset, size, rank)
        rows.place = place
        made = [made for made, _ in zip(rows, range(steps), strict=False)]
        parts.append([batch for _, batch in made])
        places.append([after for after, _ in made])
    assert all(each == places[0] for each in places)
    return [list(chain(*batch)) for batch in zip(*parts, strict=True)], places[0]


@pytest.mark.parametrize(
    "dataset", [Numbers(23), Stream(23), Numbers(3), Stream(3)], ids=["map", "stream", "short map", "short stream"]
)
def test_ranks_share_the_batches_of_one_and_go_on_after_each_step(dataset: Any) -> None:
    """Also what augmentation draws, and with a batch of several epochs."""
    alone, places = taken(dataset, 1)
    assert len({sample[1] for batch in alone for sample in batch}) == BATCH * STEPS
    for size in (2, 3, 4, 7):
        assert taken(dataset, size) == (alone, places), size
    for step in range(1, STEPS):
        assert taken(dataset, 1 + step % 4, places[step - 1], steps=1)[0] == alone[step : step + 1]


def test_an_epoch_has_each_sample_once_in_another_order() -> None:
    numbers = [sample[0] for batch in taken(Numbers(21), 3, steps=9)[0] for sample in batch]
    epochs = [numbers[at : at + 21] for at in (0, 21, 42)]
    assert all(sorted(epoch) == list(range(21)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = [
        sample[0] for _, batch in zip(range(3), rows_of(Numbers(21), 1, 0, seed=4), strict=False) for sample in batch[1]
    ]
    assert other != epochs[0]


@pytest.mark.parametrize(
    ("dataset", "place", "words"),
    [(Stream(5), SamplePlace(0, 6), "ended after 5"), (Stream(0), SamplePlace(0, 0), "no samples")],
)
def test_a_stream_that_is_too_short(dataset: Stream, place: SamplePlace, words: str) -> None:
    rows = rows_of(dataset, 1, 0)
    rows.place = place
    with pytest.raises(ValueError, match=words):
        next(iter(rows))


def test_workers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = taken(Numbers(23), 1)
    for worker in range(3):
        info = type("", (), {"id": worker, "num_workers": 3})
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda info=info: info)
        rows = rows_of(Numbers(23), 1, 0)
        assert [made[1] for made, _ in zip(rows, range(4), strict=False)] == alone[worker::3]
    assert get_worker_info() is None


def test_the_generators_of_the_training_stay_as_they_are() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with generators_kept():
        seed_generators("a")
        torch.rand(3), random.random(), np.random.rand()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_forked_workers_are_refused() -> None:
    check_start(DataLoader(Numbers(4)))
    check_start(DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn"))
    for context in ("fork", None) if torch.multiprocessing.get_all_start_methods()[0] == "fork" else ("fork",):
        with pytest.raises(ValueError, match=r'forks its 1 workers.* multiprocessing_context="spawn"$'):
            check_start(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=context))


def test_samples_of_tar_files(tmp_path: Path) -> None:
    """Of several shards, one of them compressed, in any order, and in a copy that a worker gets."""
    names = pairs(tmp_path)
    packed = tmp_path / "pairs-3.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "pairs-1.tar").read_bytes()))
    samples = TarSamples([names, str(packed)], number_and_text, cache=str(tmp_path))
    numbers = [*range(13), 5]
    assert len(samples) == 14
    for copy in (samples, pickle.loads(pickle.dumps(samples))):
        for index in (13, 4, 0, 5, 6, 12, *range(14)):
            number = numbers[index]
            assert copy[index] == (number, f"the number {number}", f"pairs/{number:04}")
    assert [sample[0] for sample in samples] == numbers  # type: ignore[attr-defined]
    rows = MapRows(samples, Share(14, ((0, 14),)), seed=0, collate=list, is_shuffled=True)
    assert sorted(sample[0] for sample in next(iter(rows))[1]) == sorted(numbers)


def test_bad_tar_samples_are_named(tmp_path: Path) -> None:
    samples = TarSamples(pairs(tmp_path), lambda parts: parts["jpg"])
    with pytest.raises(
        DamagedSampleError, match=r"pairs-1\.tar, sample 'pairs/0005': decode has raised KeyError: 'jpg'"
    ):
        samples[5]
    with pytest.raises(IndexError, match="from 0 to 12, got 13"):
        samples[13]
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"expected tar files, got .*a\.jsonl"):
        TarSamples(str(tmp_path / "a.jsonl"), number_and_text)
