"""Shards compressed by zstd: of several frames, some to be skipped, and content that says anything; some are damaged."""

from importlib.util import find_spec
from pathlib import Path
from random import Random

from fuzzing.shards import packed_parts, read_shard
from fuzzing.target import Files, Parts, Sound, Target

_SKIPPED = b"\x50\x2a\x4d\x18\4\0\0\0skip"
_MOST_BYTES = 1 << 28


class ZstShard(Target):
    share_damaged, share_sound = 0.35, 0.1

    def missing(self) -> str | None:
        return None if find_spec("zstandard") else "zstandard is not installed"

    def sound(self, rng: Random) -> Sound:
        return packed_parts(rng)

    def wrap(self, rng: Random, parts: Parts) -> Files:
        import zstandard

        ((name, content),) = parts.items()
        packer = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=rng.random() < 0.5)
        middle = rng.choice([0, rng.randrange(len(content) + 1)])
        frames = [packer.compress(content[:middle]), rng.choice([b"", _SKIPPED]), packer.compress(content[middle:])]
        return {f"{name}.zst": b"".join(frames[middle == 0 :])}

    def passes(self, files: Files) -> bool:
        import zstandard

        (data,) = files.values()
        assert isinstance(data, bytes)
        frame, num_bytes = zstandard.ZstdDecompressor(), 0
        try:
            with frame.stream_reader(data, read_across_frames=True) as stream:
                while (piece := stream.read(1 << 20)) and num_bytes < _MOST_BYTES:
                    num_bytes += len(piece)
        except zstandard.ZstdError:
            return False
        return num_bytes > 0

    def read(self, folder: Path) -> object:
        (path,) = folder.iterdir()
        return read_shard(path)


TARGET = ZstShard()
