"""Shards in tar files: headers, pax records and maps of sparse files say anything, with checksums that fit."""

from pathlib import Path
from random import Random

from fuzzing.mutation import mutate_bytes
from fuzzing.shards import read_shard, tar, with_checksum
from fuzzing.target import Files, Parts, Sound, Target

from mpitrain.job.data.documents.tar.numbers import BLOCK, is_header

KINDS = b"0\x0071234567SLKxXgMVDZ"
NUMBERS = (
    b"00000000000\0", b"77777777777\0", b"00000000001 ", b"\x80" + bytes(7) + b"\1\0\0\0", b"\x80" + b"\xff" * 11, b"\xff" * 12,
    b"00000001000\0", b"-0000000001\0", b"0x000000010\0", bytes(12), b"00000000777\0",
)  # fmt: skip
NAMES = (
    b"0.txt", b"./0.txt", b"../0.txt", b"/etc/passwd", b".hidden", b"._0.txt", b"a/", b"", b"0..txt", b"a//b.txt", b"\xff\xfe.txt",
    b"x" * 100, b"1.txt", b"d", b"d/../1.txt", b"__key__.__key__", b"\x1b[31m.txt", b"h.txt", b"f", b"f2.txt",
)  # fmt: skip
RECORDS = (
    b"22 path=long/name.txt\n", b"12 size=100\n", b"13 size=9999\n", b"27 GNU.sparse.map=0,1,512,1\n", b"16 linkpath=x.y\n",
    b"22 GNU.sparse.major=1\n", b"999999999 a=b\n", b"0 \n", b"6 a=b\n", b"25 GNU.sparse.realsize=5\n", b"-5 a=b\n", b"5\n100\n5\n",
    b"99999999\n1\n1\n", b"1\n99999999999\n5\n",
)  # fmt: skip
FIELDS = (
    ((156,), tuple(bytes([kind]) for kind in KINDS)),
    ((0, 157), tuple(name.ljust(100, b"\0") for name in NAMES)),
    ((124, 124, 386, 398, 410, 422, 483), NUMBERS),
    ((257,), (b"ustar\x0000", b"ustar  \0", bytes(8), b"ustar\0\0\0")),
    ((345,), tuple(name.ljust(155, b"\0") for name in NAMES)),
    ((482,), (b"\0", b"\1")),
)
"""What is put into a header, and at which bytes."""


class TarShard(Target):
    """The part is the list of the blocks; each is a header or not, as it was in the sound file."""

    share_sound = 0.1

    def sound(self, rng: Random) -> Sound:
        data, samples = tar(rng)
        blocks = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
        return Sound({"a.tar": [(block, is_header(block)) for block in blocks]}, samples)

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        blocks = list(parts["a.tar"])
        at, to = rng.randrange(len(blocks)), rng.randrange(len(blocks))
        kind = rng.randrange(10)
        if kind < 6:
            blocks[at] = _with_change(rng, *rng.choice([block for block in blocks if any(block[0])] or blocks))
        elif kind == 6:
            blocks[at], blocks[to] = blocks[to], blocks[at]
        elif kind == 7:
            blocks.insert(to, blocks[at])
        elif len(blocks) > 1:
            del blocks[at : at + rng.choice([1, 1, 2, 100])]
        return {"a.tar": blocks or [(bytes(BLOCK), False)]}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        return {"a.tar": b"".join(with_checksum(block) if is_head else block for block, is_head in parts["a.tar"])}

    def passes(self, files: Files) -> bool:
        data = files["a.tar"]
        assert isinstance(data, bytes)
        return is_header(data[:BLOCK])

    def read(self, folder: Path) -> object:
        return read_shard(folder / "a.tar")


def _with_change(rng: Random, block: bytes, is_head: bool) -> tuple[bytes, bool]:
    if is_head and rng.random() < 0.8:
        places, values = rng.choice(FIELDS)
        at, value = rng.choice(places), rng.choice(values)
    elif rng.random() < 0.7:
        at, value = rng.choice([0, rng.randrange(BLOCK)]), rng.choice(RECORDS)
    else:
        return mutate_bytes(rng, block)[:BLOCK].ljust(BLOCK, b"\0"), is_head
    return (block[:at] + value + block[at + len(value) :])[:BLOCK], is_head


TARGET = TarShard()
