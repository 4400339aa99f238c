"""Shards of JSON Lines: records that say anything, in all forms of lines, and text that is no JSON."""

import json
from pathlib import Path
from random import Random

from fuzzing.shards import line_text, read_shard, records, texts_of
from fuzzing.target import Files, Parts, Sound, Target


class JsonLines(Target):
    share_damaged = 0.5

    share_sound = 0.1

    def sound(self, rng: Random) -> Sound:
        its = records(rng)
        return Sound({"a.jsonl": its}, texts_of(its))

    def wrap(self, rng: Random, parts: Parts) -> Files:
        its = parts["a.jsonl"]
        return {"a.jsonl": line_text(rng, its if isinstance(its, list) else [its]) or b"\n"}

    def passes(self, files: Files) -> bool:
        data = files["a.jsonl"]
        assert isinstance(data, bytes)
        try:
            first = json.loads(data.decode("utf-8-sig").split("\n", 1)[0])
        except (ValueError, RecursionError):
            return False
        return isinstance(first, dict)

    def read(self, folder: Path) -> object:
        return read_shard(folder / "a.jsonl")


TARGET = JsonLines()
