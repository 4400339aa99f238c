"""Data of less than a batch, or less than a window, as the ranks of a job see them."""

import re
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator, on_all_ranks
from collectives.transports.node import anonymous
from mpitrain.job.config import parse
from mpitrain.job.data import loading
from mpitrain.job.data.loading import Corpus, load_data
from mpitrain.job.train.batches.rank_batches import RankBatches

CONTEXT, BATCH = 24, 7


@pytest.mark.ranks(2)
def test_a_text_without_node_memory_is_there_once_or_on_each_rank_or_an_error(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, path = bytes(n % 251 for n in range(8000)), shared_tmp / "text"
    if comm.rank == 0:
        path.write_bytes(text)
    comm.barrier()
    config = parse(["--data.path", str(path), "--model.context", str(CONTEXT)]).data

    def loaded() -> np.ndarray:
        found = load_data(config, comm, batch=BATCH, context=CONTEXT)
        assert isinstance(found, Corpus)
        return found.train

    def is_one(tokens: np.ndarray) -> bool:
        """Whether rank 1 sees what rank 0 writes."""
        comm.barrier()
        if comm.rank == 0:
            tokens[0] = 255
        comm.barrier()
        return bool(comm.broadcast_object(int(tokens[0]), 1) == 255)

    def refuse(place: anonymous.FilePlace) -> int:
        raise PermissionError(f"Permission denied: {place.path}")

    expected = loaded().copy()
    monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
    assert np.array_equal(tokens := loaded(), expected) and is_one(tokens)
    monkeypatch.setattr(anonymous, "open_at", refuse)
    assert np.array_equal(tokens := loaded(), expected) and not is_one(tokens)
    monkeypatch.setattr(loading, "available_bytes", lambda: 8000)  # less than two copies
    with pytest.raises(
        OSError, match=r"cannot share .*Permission denied.*a copy of the data for each of 2 ranks"
    ) as caught:
        loaded()
    assert on_all_ranks(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["one file", "two files", "tokens"])
@pytest.mark.parametrize(
    ("num", "lacks"),
    [
        (
            25,
            "7 windows of a batch overlap in the 25 training tokens; the 0 held-out tokens are less than a window of 24, so",
        ),
        (
            100,
            "7 windows of a batch overlap in the 95 training tokens; the [567] held-out tokens are less than a window of 24, so",
        ),
        (600, "7 windows of an evaluation overlap in the "),
        (4000, ""),
    ],
)
def test_one_line_says_what_few_data_change(
    comm: Communicator, shared_tmp: Path, kind: str, num: int, lacks: str
) -> None:
    """The ranks have full batches of the text, for the training and for evaluations. Separators make a few tokens more."""
    text = bytes(n % 96 + 32 for n in range(num))
    path = shared_tmp / ("tokens.npy" if kind == "tokens" else "text")
    if comm.rank == 0:
        if kind == "tokens":
            np.save(path, np.frombuffer(text, np.uint8))
        elif kind == "one file":
            path.write_bytes(text[:-1])
        else:
            path.mkdir()
            (path / "a").write_bytes(text[: num // 2])
            (path / "b").write_bytes(text[num // 2 : -2])
    comm.barrier()
    config = parse(["--data.path", str(path), "--model.context", str(CONTEXT), "--train.batch", str(BATCH)])
    batches = RankBatches(config, load_data(config.data, comm, batch=BATCH, context=CONTEXT), comm)

    (line,) = batches.lacks or [""]
    assert re.match(f"few data: the {lacks}", line) if lacks else not line, line
    steps = [step[0].tokens for step in map(batches.of_step, range(3))]
    held = [batches.of_evaluation(index)[0].tokens for index in range(batches.heldout.num_batches)]
    assert len(held) == {25: 0, 100: 0, 600: 1, 4000: 1}[num]
    for rows in steps + held:
        assert rows.shape == ((3, 4)[comm.rank], CONTEXT)
        assert (rows[:, 1:] - rows[:, :-1] == 1).float().mean() > 0.9, "windows of the text"


@pytest.mark.ranks(2)
def test_less_than_a_window_is_an_error_on_all_ranks(comm: Communicator, shared_tmp: Path) -> None:
    if comm.rank == 0:
        (shared_tmp / "text").write_bytes(bytes(range(32, 32 + CONTEXT - 1)))
    comm.barrier()
    config = parse(["--data.path", str(shared_tmp / "text"), "--model.context", str(CONTEXT)])
    found = load_data(config.data, comm, batch=BATCH, context=CONTEXT)
    with pytest.raises(
        ValueError, match=r"data.path: a window of 24 tokens needs 25 training tokens, got 24; take more"
    ):
        RankBatches(config, found, comm)
