"""Shards compressed by gzip: of several members, with names and comments, and content that says anything; some are damaged."""

import gzip
import zlib
from pathlib import Path
from random import Random

from fuzzing.shards import packed_parts, read_shard
from fuzzing.target import Files, Parts, Sound, Target


class GzShard(Target):
    share_damaged, share_sound = 0.35, 0.1

    def sound(self, rng: Random) -> Sound:
        return packed_parts(rng)

    def wrap(self, rng: Random, parts: Parts) -> Files:
        ((name, content),) = parts.items()
        middle = rng.choice([0, rng.randrange(len(content) + 1)])
        members = [gzip.compress(piece, 1, mtime=0) for piece in (content[:middle], content[middle:])]
        fields = rng.choice([(0, b""), (8, b"name\0"), (16, b"comment\0"), (4, b"\3\0abc")])
        members[1] = members[1][:3] + bytes([fields[0]]) + members[1][4:10] + fields[1] + members[1][10:]
        return {f"{name}.gz": b"".join(members[middle == 0 :]) + bytes(rng.choice([0, 0, 512]))}

    def passes(self, files: Files) -> bool:
        (data,) = files.values()
        assert isinstance(data, bytes)
        try:
            gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return False
        return True

    def read(self, folder: Path) -> object:
        (path,) = folder.iterdir()
        return read_shard(path)


TARGET = GzShard()
