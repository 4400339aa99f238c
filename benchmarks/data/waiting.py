"""The time that a training step waits for its rows, and the first batch after a resume."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.shards import list_shards
from mpitrain.job.data.streaming.batches import DocumentBatches
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.processes import Processes
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import Tokenizer

CONTEXT, ROWS = 1024, 8
STEP_S = 0.1
START_S = 1.0  # after which the processes of a rank run
_SIZE = 512  # of the matrices that a step multiplies
_LANES = 64  # of the resume
_WARM_UP = 3

Get = Callable[[int], np.ndarray]
"""The rows of a step: int64 of shape (ROWS, CONTEXT + 1)."""


def recipe(folder: Path, tokenizer: Tokenizer, *, lanes: int = ROWS) -> Recipe:
    """The recipe of a run with `lanes` rows on the shards in a folder."""
    source = DocumentSource.new("documents", list_shards([f"{folder}/*"]), lanes=lanes)
    return Recipe((source,), (((0, 1.0),),), lanes, lanes, CONTEXT, 1, "cut", ShardCache(), tokenizer)


@contextmanager
def documents(made: Recipe, num_processes: int) -> Iterator[Get]:
    """Rows of documents, which so many processes tokenize ahead; 0: this one, when they are asked for."""
    processes = Processes(num_processes, print) if num_processes else None
    try:
        batches = DocumentBatches(made, partial(open_lanes, say=print) if processes is None else processes.open_lanes)
        yield lambda step: batches.get(step, range(made.batch)).tokens.astype(np.int64)
    finally:
        if processes is not None:
            processes.close()


@contextmanager
def token_file(made: Recipe, steps: int, path: Path) -> Iterator[Get]:
    """The same rows from a memory-mapped file, which is written first."""
    with documents(made, 0) as get:
        np.save(path, np.stack([get(step).astype(np.int32) for step in range(steps)]))
    rows = np.load(path, mmap_mode="r")
    yield lambda step: rows[step].astype(np.int64)


class Steps:
    """Steps that compute for STEP_S on one core, when nothing else runs, after they have their rows."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._matrix = torch.randn(_SIZE, _SIZE)
        self._compute(50)
        began = time.perf_counter()
        self._compute(200)
        self._num = max(1, round(STEP_S * 200 / (time.perf_counter() - began)))

    def run(self, get: Get, steps: int) -> tuple[float, float]:
        """The mean seconds of a step, and of its wait for the rows, after some steps to warm up."""
        taken, waited = [], []
        for step in range(steps):
            began = time.perf_counter()
            torch.from_numpy(get(step))
            ready = time.perf_counter()
            self._compute(self._num)
            taken.append(time.perf_counter() - began)
            waited.append(ready - began)
        return mean(taken[_WARM_UP:]), mean(waited[_WARM_UP:])

    def _compute(self, num: int) -> None:
        for _ in range(num):
            torch.mm(self._matrix, self._matrix)


def first_batch_s(folder: Path, tokenizer: Tokenizer, num_processes: int) -> float:
    """Seconds from a state that was saved in the middle of the documents to the first batch, with processes that run already."""
    made = recipe(folder, tokenizer, lanes=_LANES)
    with documents(made, 0) as get:
        get(0)
    before = DocumentBatches(made, partial(open_lanes, say=print))
    before.get(5, range(_LANES))
    meta, tensors = before.described()
    tensors["lanes"] = before.states(6, range(_LANES))[1]
    processes = Processes(num_processes, print) if num_processes else None
    try:
        after = DocumentBatches(made, partial(open_lanes, say=print) if processes is None else processes.open_lanes)
        time.sleep(START_S)
        began = time.perf_counter()
        after.go_on(6, 6 * _LANES)
        after.load(6 * _LANES, meta, tensors)
        after.get(6, range(_LANES))
        return time.perf_counter() - began
    finally:
        if processes is not None:
            processes.close()
