"""Small checkpoints for tests: how one is saved, read and damaged, what lies in a folder, and what a command prints."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.cli import main
from ckpt.storage.places import absolute


def save(path: str | os.PathLike[str], value: float = 1.0, **options: Any) -> Path:
    """A checkpoint of one tensor, `x`, whose elements all have that value."""
    return ckpt.save(path, {"x": np.full(5, float(value))}, comm=None, **options)


def shards_of_three(rank: int) -> dict[str, Any]:
    """What a rank of three saves: shards by rows and columns, and tensors that all have."""
    rng = np.random.default_rng(7)
    return {
        "m/rows": ckpt.Shard(np.full((2, 3), rank + 0.5, np.float32), (6, 3), (2 * rank, 0), axes=("dp", None)),
        "m/columns": ckpt.Shard(np.full((3, 2), rank, np.float32), (3, 6), (0, 2 * rank)),
        "m/whole": rng.integers(0, 99, 40),
        "m/half": np.ones(5, np.float16),
        "m/scalar": np.array(3),
        "m/empty": np.zeros((0, 4), np.float32),
    }


def value_of(path: Path) -> float:
    """The value with which `save` made a checkpoint."""
    x = np.empty(5)
    ckpt.load(path, {"x": x})
    assert (x == x[0]).all()
    return float(x[0])


def tensors(checkpoint: Path | None) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything in a checkpoint, as bytes."""
    assert checkpoint is not None
    arrays = {name: np.asarray(entry.read()) for name, entry in ckpt.open(checkpoint).items()}
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def names(place: str | os.PathLike[str]) -> list[str]:
    """What lies in a folder, be it a local or a remote one, in order."""
    return sorted(absolute(place).names())


def owner(pid: int, host: str | None = None, start: str | None = None) -> str:
    """What a save of that process, on this host or another, writes of itself into `.owner`."""
    return json.dumps({"host": host or socket.gethostname(), "pid": pid, "start": start, "token": "t"})


def flip_bit(file: Path, at: int | bytes = -1) -> None:
    """Damage a file by one bit: of the byte at a position, or of the first byte of a text that stands in the file."""
    data = bytearray(file.read_bytes())
    data[data.index(at) if isinstance(at, bytes) else at] ^= 1
    file.write_bytes(data)


def printed(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    """What a command of `python -m ckpt` prints; the command ends with this exit code and says nothing on stderr."""
    found = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert (found, err) == (code, ""), out
    return out
