"""torch's `.pt` files for `ckpt import`: mutated pickles, records and fields of the zip file, whose checksums fit."""

import io
import zipfile
from functools import cache
from pathlib import Path
from random import Random

import torch
from fuzzing.mutation import mutate_bytes
from fuzzing.pickles import program
from fuzzing.target import Files, Parts, Target
from fuzzing.zips import ZIP, archive_of, change, is_zip

import ckpt
from ckpt.convert.formats import torch_archive

_PICKLE = "archive/data.pkl"
_CALLABLES = [
    *(b"__builtin__\nbytearray", b"builtins\nset", b"collections\nOrderedDict", b"os\nsystem", b"_codecs\nencode"),
    *(
        b"torch\nTensor",
        b"torch\nSize",
        b"torch\nfloat8_e5m2",
        b"torch.storage\nUntypedStorage",
        b"torch._utils\n_rebuild_qtensor",
    ),
]
_TOKENS = [
    *(b"c" + name + b"\n" for name in _CALLABLES),
    *(
        b")R",
        b"\x85R",
        b"\x86R",
        b"R",
        b"b",
        b"Q",
        b"\x81",
        b"]",
        b"}",
        b")",
        b"(",
        b"t",
        b"e",
        b"u",
        b"s",
        b"a",
        b"N",
        b"\x88",
        b"0",
    ),
    *(
        b"h\x00",
        b"q\x00",
        b"h\x05",
        b"r\xff\xff\xff\x7f",
        b"j\x00\x00\x00\x00",
        b"J\xff\xff\xff\x7f",
        b"J\x00\x00\x00\x80",
        b"K\xff",
    ),
    *(b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\xff" + b"\x7f" * 255, b"X\xff\xff\xff\x7f", b"G\x7f\xf0" + bytes(6)),
    b"](h\x00h\x00e" * 30,
]


@cache
def records(kind: int) -> dict[str, bytes]:
    """The records of a file of torch.save."""
    model = torch.nn.Linear(3, 2)
    shared = torch.arange(12.0).reshape(3, 4)
    content = [
        {"model": model.state_dict(), "step": 3, "lr": 0.5, "name": "x", "none": None, "betas": (0.9, 0.95)},
        {"a": shared, "b": shared.T, "c": shared[1:], "half": torch.ones(5).bfloat16(), "e": shared[:1].expand(7, 4)},
        {
            "p": model.weight,
            "l": [torch.ones(()), [1, [2, torch.zeros(0, 3)]]],
            7: True,
            "f": torch.ones(3).to(torch.float8_e5m2),
        },
    ][kind]
    file = io.BytesIO()
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class TorchFile(Target):
    errors = (ValueError, OSError)

    def missing(self) -> str | None:
        return torch_archive.version_error(torch.__version__)

    def make(self, rng: Random) -> Parts:
        return dict(records(rng.randrange(3)))

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        if rng.random() < 0.3:
            return {**parts, ZIP: [*parts.get(ZIP, []), change(rng, len(parts))]}
        if rng.random() < 0.3:
            name = rng.choice([name for name in parts if name != ZIP])
            return {**parts, name: mutate_bytes(rng, parts[name])}
        if rng.random() < 0.4:
            return {**parts, _PICKLE: program(rng)}
        data: bytes = parts[_PICKLE]
        if rng.random() < 0.5:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(_TOKENS) + data[at + rng.choice([0, 0, 1, 2]) :]
        else:
            data = mutate_bytes(rng, data)
        return {**parts, _PICKLE: data}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        records = {name: data for name, data in parts.items() if name != ZIP}
        return {"x.pt": archive_of(records, parts.get(ZIP, []))}

    def passes(self, files: Files) -> bool:
        content = files["x.pt"]
        assert isinstance(content, bytes)
        return is_zip(content)

    def read(self, folder: Path) -> None:
        path = ckpt.import_file(folder / "x.pt", folder.with_name("output") / "c")
        assert ckpt.verify(path, threads=1) == []


TARGET = TorchFile()
