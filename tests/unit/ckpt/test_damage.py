"""Accidents: bits that flip and files that end early are found, wherever in a checkpoint, and the file is named.

And a fuzzer of manifests, whose checksums fit: whatever they say, they are refused or read what lies inside their files.
CKPT_FUZZ_CASES=100000 runs more of its cases, CKPT_FUZZ_SEED=N others.
"""

import copy
import json
import os
import random

import numpy as np
import pytest
from forging import signed
from thread_ranks import on_ranks

import ckpt
from ckpt.format.manifest import FILE_NAME

NUM_DAMAGED = 1000
FUZZ_CASES = int(os.environ.get("CKPT_FUZZ_CASES", "2000"))
FUZZ_SEED = int(os.environ.get("CKPT_FUZZ_SEED", "0"))


def held(rank):
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


def saved(folder, files):
    """A checkpoint, and what it holds."""
    path = on_ranks(3, lambda comm: ckpt.save(folder, held(comm.rank), comm=comm, files=files, meta={"step": 1}))[0]
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


INTERESTING = [
    *(0, 1, -1, 2, 3, 63, 64, 65, 4096, 1 << 20, 1 << 31, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e308, float("inf"), float("nan"), True, False, None),
    *("", ".", "..", "/", "a/b", "m/rows", "\x1b[0m", "\ud800", "ü", "float32", "int8", "0" * 16, "f" * 32, FILE_NAME),
    *([], {}, [0], [0, 0], [[]], [1 << 62] * 3, [1] * 33, {"name": "a"}),
]


def places(value, path=()):
    """The paths to all values in JSON."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def mutate(rng, root):
    """Change something in `root`, a list of the manifest's lines."""
    everywhere = [path for path in places(root) if path]
    *parents, key = rng.choice(everywhere)
    at = root
    for parent in parents:
        at = at[parent]
    kind = rng.randrange(6)
    if kind == 0 and len(parents) > 0:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(at[key]))
    elif kind == 2:
        other = root
        for step in rng.choice(everywhere):
            other = other[step]
        at[key] = copy.deepcopy(other)
    elif kind == 3 and isinstance(at, list):
        rng.shuffle(at)
    elif type(at[key]) is int:
        at[key] = rng.choice([at[key] + 1, at[key] - 1, at[key] * 2, at[key] ^ 1 << rng.randrange(40), -at[key]])
    else:
        at[key] = copy.deepcopy(rng.choice(INTERESTING))


def fuzzed(rng, lines):
    root = [json.loads(line) for line in lines]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        mutate(rng, root)
    if isinstance(root[0], dict) and rng.random() < 0.7:
        root[0]["tensors"] = len(root) - 2
    texts = [json.dumps(line).encode() for line in root]
    if rng.random() < 0.1:
        text = bytearray(texts[number := rng.randrange(len(texts))])
        text[rng.randrange(len(text))] = rng.randrange(256)
        texts[number] = bytes(text)
    return signed(texts)


def test_whatever_a_manifest_says(tmp_path):
    path, values = saved(tmp_path / "a", 2)
    lines = (path / FILE_NAME).read_bytes().splitlines()[:-1]
    most = sum(value.nbytes for value in values.values())
    assert on_disk(path) > most
    refused = []
    for case in range(FUZZ_CASES):
        data = fuzzed(random.Random(f"{FUZZ_SEED} {case}"), lines)
        (path / FILE_NAME).write_bytes(data)
        try:
            (listed,) = ckpt.list_checkpoints(tmp_path)
            assert listed.problem is None or listed.problem.isprintable(), case
            checkpoint = ckpt.open(path)
            ckpt.verify(path, threads=1)
            for entry in checkpoint.values():
                assert entry.nbytes <= on_disk(path)
                for check in (False, True):
                    array = entry.read(verify=check)
                    assert (array.shape, array.dtype) == (entry.shape, entry.dtype)
        except ckpt.CheckpointError as error:
            refused.append(str(error))
        except Exception as error:
            error.add_note(f"case {case} of seed {FUZZ_SEED}: {data!r}")
            raise
    assert 0 < len(refused) < FUZZ_CASES
    assert all(message.isprintable() and len(message) < 2000 for message in refused)


def on_disk(path):
    return sum(part.stat().st_size for part in path.iterdir())
