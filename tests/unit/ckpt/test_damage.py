"""Accidents: bits that flip and files that end early are found, wherever in a checkpoint, and the file is named.

Manifests whose checksums fit, whatever they say, are in tests/fuzz.
"""

import random

import numpy as np
import pytest
from checkpoints import shards_of_three
from thread_ranks import on_ranks

import ckpt

pytestmark = pytest.mark.rest

NUM_DAMAGED = 1000


def saved(folder, files):
    """A checkpoint, and what it holds."""
    path = on_ranks(
        3, lambda comm: ckpt.save(folder, shards_of_three(comm.rank), comm=comm, files=files, meta={"step": 1})
    )[0]
    return path, {name: entry.read() for name, entry in ckpt.open(path).items()}


@pytest.mark.parametrize("files", ["rank", "one"])
def test_flipped_bits_and_truncations_are_found_and_named(tmp_path, files):
    path, values = saved(tmp_path / "a", files)
    parts = {part.name: part.read_bytes() for part in path.iterdir()}
    assert len(parts) == {"rank": 5, "one": 3}[files]
    rng = random.Random(files)
    missed = []
    for _ in range(NUM_DAMAGED // 2):
        # a byte of any file is as likely as any other
        name = rng.choices(list(parts), [len(data) for data in parts.values()])[0]
        data = bytearray(parts[name])
        at = rng.randrange(len(data))
        if rng.random() < 0.25:
            del data[at:]
        else:
            data[at] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
        if name.removesuffix(".jsonl") not in complaint(path, values):
            missed.append((name, at, len(data)))
        (path / name).write_bytes(parts[name])
    assert not missed
    assert complaint(path, values) == ""


def complaint(path, values):
    """What loading and verifying say; what was loaded without a complaint is what was saved."""
    arrays = {name: np.zeros_like(value) for name, value in values.items()}
    try:
        assert ckpt.load(path, arrays) == {"step": 1}
    except ckpt.CheckpointError as error:
        return str(error)
    assert all(np.array_equal(arrays[name], values[name]) for name in values)
    return "; ".join(map(str, ckpt.verify(path, threads=1)))
