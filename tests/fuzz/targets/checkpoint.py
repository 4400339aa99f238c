"""Checkpoints: the manifest says anything, with a checksum that fits; some data files are damaged, which their checksums show."""

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import xxhash
from checkpoints import shards_of_three
from forging import signed
from fuzzing.mutation import mutate_bytes
from fuzzing.target import Files, Parts, Target
from thread_ranks import on_ranks

import ckpt
from ckpt.format.manifest import FILE_NAME
from collectives.texts import shown

_DAMAGES_TEXT = "damaged text"  # a part that is no file: a line of the manifest is damaged as text


@cache
def saved(files: str | int) -> dict[str, bytes]:
    """The files of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        meta = {"step": 1, "notes": ["a", {"b": 2.5}]}
        path = on_ranks(
            3, lambda comm: ckpt.save(f"{folder}/a", shards_of_three(comm.rank), comm=comm, files=files, meta=meta)
        )[0]
        return {part.name: part.read_bytes() for part in path.iterdir()}


class Checkpoint(Target):
    errors = (ckpt.CheckpointError,)

    def make(self, rng: Random) -> Parts:
        files = saved(rng.choice(["rank", "one", 2]))
        return {**files, FILE_NAME: [json.loads(line) for line in files[FILE_NAME].splitlines()[:-1]]}

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        if rng.random() < 0.1:
            return {**parts, _DAMAGES_TEXT: lambda path: None}
        chosen = {FILE_NAME: parts[FILE_NAME]} if rng.random() < 0.95 else parts
        return {**parts, **super().mutate(rng, chosen)}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        lines = parts[FILE_NAME]
        lines = lines if isinstance(lines, list) else [lines]
        if lines and isinstance(lines[0], dict) and rng.random() < 0.7:
            lines[0]["tensors"] = len(lines) - 2
        texts = [json.dumps(line).encode() for line in lines]
        if texts and _DAMAGES_TEXT in parts:
            number = rng.randrange(len(texts))
            texts[number] = mutate_bytes(rng, texts[number])
        named = {f"a/{name}": content for name, content in parts.items() if name != _DAMAGES_TEXT}
        return {**named, f"a/{FILE_NAME}": signed(texts)}

    def passes(self, files: Files) -> bool:
        data = files[f"a/{FILE_NAME}"]
        assert isinstance(data, bytes)
        body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
        return last == b'{"xxh3":"%s"}' % xxhash.xxh3_64_hexdigest(body + b"\n").encode()

    def read(self, folder: Path) -> None:
        path = folder / "a"
        (listed,) = ckpt.list_checkpoints(folder)
        assert listed.problem is None or shown(listed.problem) == listed.problem
        checkpoint = ckpt.open(path)
        on_disk = sum(part.stat().st_size for part in path.iterdir())
        damages = ckpt.verify(path, threads=1)
        assert all(shown(text) == text for text in map(str, damages))
        for entry in checkpoint.values():
            assert entry.nbytes <= on_disk
            for check in (False, True):
                array = entry.read(verify=check)
                assert (array.shape, array.dtype) == (entry.shape, entry.dtype)


TARGET = Checkpoint()
