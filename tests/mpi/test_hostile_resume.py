"""A resume from a checkpoint of a stranger, whose meta says anything: one error on all ranks, before anything is allocated."""

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import forge
from small_trainers import Make, maker

import ckpt
import collectives
from collectives import Communicator
from mpitrain.job.config import ConfigError
from mpitrain.weights.state import OnDisk


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder, with documents."""
    if comm.rank == 0:
        with open(shared_tmp / "a.jsonl", "w") as shard:
            shard.writelines(json.dumps({"text": f"some words {number} " * 9}) + "\n" for number in range(200))
    comm.barrier()
    return maker(comm, shared_tmp, monkeypatch)


def edited(path: list[str | int], value: Any) -> Callable[[Any, Any, Any], None]:
    """Put another value to a place in the meta."""

    def edit(header: Any, meta: Any, tensors: Any) -> None:
        *above, key = path
        at = meta
        for step in above:
            at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
        at[key] = value

    return edit


META: list[tuple[list[str | int], Any]] = [
    *((["step"], value) for value in ("x", -1, 1.5, None, [], 1 << 60, True)),
    *((["num_ranks"], value) for value in (0, "2", 1 << 40)),
    (["config"], []),
    (["data"], 5),
    *((["data", "next_sample"], value) for value in ("x", 1 << 62, -3)),
    (["data", "documents"], [1]),
    *((["data", "documents", "lanes"], value) for value in ("x", 0, -4, 1.5, None, 1 << 40, 12 << 20, [12])),
    *((["data", "documents", "list_bytes", "shards/a"], value) for value in ("x", 1 << 50, -1, 0)),
    (["data", "documents", "list_bytes", "more"], 1 << 45),
    (["data", "documents", "order"], None),
    (["data", "documents", "sources"], [{}]),
    *((["data", "documents", "sources", 0, "chunk_bytes"], value) for value in (0, "x")),
    *((["data", "documents", "sources", 0, "eras"], value) for value in ([], [[0]], [[0, -1]], "x")),
    *((["health", "left_out"], value) for value in ([[0, 1 << 60]], [[0, 1 << 50]], [[0]], 7)),
    (["health", "windows"], [[], [], []]),
    (["stepper"], {"skipped": "x"}),
    (["wires"], {"wire": 5}),
    *((["optimizer", "groups"], value) for value in ([], {}, [5])),
    (["optimizer", "state"], []),
    (["optimizer", "names"], [[]] * 7),
    (["optimizer", "names"], None),
    (["optimizer", "others"], [[{"type": "torch.dtype", "value": "load"}, 1]]),
    (["optimizer", "cut"], {"wte.weight": 5}),
    (["saved_only"], {"a": 1}),
    (["extra"], {"mpitrain.value": {"type": "complex", "value": 5}}),
    (["extra"], {"mpitrain.value": {"type": "tensor", "dtype": "nn", "shape": [1], "value": [1], "device": "cpu"}}),
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_meta_of_other_types(comm: Communicator, make: Make, shared_tmp: Path) -> None:
    documents = ("--data.path", str(shared_tmp / "a.jsonl"), "--data.processes", "0", "--data.heldout", "0")
    first = make("a", 2, *documents)
    first.fit()
    path = first.run.checkpoint(2)
    manifest = path / "manifest.jsonl"
    sound = manifest.read_bytes()
    assert first.state.load(OnDisk(path)) == []
    accepted = []
    for place, value in META:
        comm.barrier()
        if comm.rank == 0:
            manifest.write_bytes(sound)
            forge(path, edited(place, value))
        comm.barrier()
        start, error = time.monotonic(), None
        try:
            first.state.load(OnDisk(path))
            accepted.append((place, value))
        except (ckpt.CheckpointError, ConfigError) as raised:
            error = raised
        assert time.monotonic() - start < 10, place
        assert error is None or (collectives.on_all_ranks(error) and str(error).isprintable()), place
        assert len(str(error)) < 2000
    assert accepted == []


def rewritten(path: Path, out: Path, **tensors: np.ndarray) -> Path:
    """The same checkpoint with other values of some tensors."""
    checkpoint = ckpt.open(path)
    values = {name: entry.read() for name, entry in checkpoint.items()}
    return ckpt.save(
        out,
        values | {name.replace("__", "/"): array for name, array in tensors.items()},
        comm=None,
        meta=checkpoint.meta,
    )


@pytest.mark.ranks(1)
def test_tensors_of_the_data_and_of_generators(make: Make, shared_tmp: Path) -> None:
    documents = ("--data.path", str(shared_tmp / "a.jsonl"), "--data.processes", "0", "--data.heldout", "0")
    first = make("a", 2, *documents)
    first.fit()
    path = first.run.checkpoint(2)
    there = ckpt.open(path)
    (listed,) = [name for name in there.names if name.startswith("data/shards/")]
    packed, lanes, states = (there[name].read() for name in (listed, "data/lanes", "random/states"))
    bomb = np.frombuffer(zlib.compress(bytes(1 << 28), 9), np.uint8)
    garbage = packed.copy()
    garbage[5] ^= 255
    far = states.copy()
    far[0, 5056 + 4 * 624 : 5056 + 4 * 625] = 255  # NumPy's place in its state
    for number, (name, value, problem) in enumerate(
        [
            (listed, garbage, "list of shards is damaged"),
            ("data/lanes", np.full_like(lanes, -1), "has places in the documents from -1"),
            ("data/lanes", np.full_like(lanes, 1 << 62), "has places in the documents from"),
            ("random/states", far, "its random states are none"),
            ("random/states", np.zeros_like(states), "its random states are none"),
            (listed, bomb, "list of shards has more than"),
        ]
    ):
        other = rewritten(path, shared_tmp / f"step-{number + 10}", **{name.replace("/", "__"): value})
        if value.shape != there[name].shape:
            forge(other, edited(["data", "documents", "list_bytes", name.removeprefix("data/")], len(value)))
        with pytest.raises((ckpt.CheckpointError, ConfigError), match=problem):
            first.state.load(OnDisk(other))
