"""Imports of files that were made to harm: refused in one line, in bounded time and memory, and before anything is written."""

import io
import json
import os
import pickle
import time
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from checkpoints import value_of
from some_tensors import forget_peak, peak_bytes, reads_torch_files

import ckpt
from ckpt.cli import main
from ckpt.convert.formats import torch_archive, torch_file
from ckpt.convert.formats.safetensors import INDEX, ONE

MAX_GROWN_BYTES, MAX_SECONDS = 400 << 20, 15


def refused(path, out):
    """The error of an import, which is one line."""
    before, start = forget_peak(), time.monotonic()
    with pytest.raises((ValueError, OSError)) as raised:
        ckpt.import_file(path, out)
    assert time.monotonic() - start < MAX_SECONDS and peak_bytes() - before < MAX_GROWN_BYTES
    message = str(raised.value)
    assert message.isprintable() and len(message) < 1500 and not out.exists()
    return message


# -- torch's files


def shared(begin, times=10, depth=30, kind=list):
    for _ in range(depth):
        begin = kind([begin] * times)
    return begin


def archive(data, others=(), method=zipfile.ZIP_STORED, comment=b""):
    """A file as of torch.save with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n"), *others):
            made.writestr(f"archive/{name}", content)
        made.comment = comment
    return file.getvalue()


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def calling(name, arguments, times=1):
    """A pickle of a dict with the results of calls."""
    calls = b"c" + name + b"\n" + arguments + b"R"
    return b"\x80\x02]" + (calls + b"a") * times + b"."


def in_itself():
    """A list of so many that torch.save writes a part of it after the list has been used."""
    items = [0] * 2000
    items[10] = items
    return items


def placed(size, stride):
    """A tensor of this size and stride in a storage of two numbers."""
    of_storage = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02"
    sizes = b"".join(b"\x8a\x08" + number.to_bytes(8, "little", signed=True) + b"\x85" for number in (size, stride))
    arguments = b"((" + of_storage + b"tQK\x00" + sizes + b"\x89ccollections\nOrderedDict\n)Rt"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"
    return archive(b"\x80\x02}X\x01\x00\x00\x00w" + call + b"s.", [("data/0", bytes(8))])


def big(number):
    """A key and a value. All such keys have the hash 0."""
    return b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little") + b"N"


HUGE = b"\x8a\x05\x00\x00\x00\x00\x10\x85"  # (1 << 36,)
MANY = b"](" + b"K\x01K\x02\x86" * 5_000 + b"e"  # a list of pairs
NUMBERS = b"](" + b"".join(b"J" + number.to_bytes(4, "little") for number in range(20_000)) + b"e"
SET_OF_0 = b"cbuiltins\nset\nh\x00\x85Ra"  # of what is at 0, into a list
DOUBLED = b"q\x00h\x00\x86"  # x becomes (x, x)
STORAGE = b"ctorch.storage\nUntypedStorage\n"
ONE_TENSOR = {"w": torch.zeros(2)}
TORCH = {
    "lists in lists": (lambda: saved({"a": shared(0), **ONE_TENSOR}), "more values"),
    "empty lists in lists": (lambda: saved({"a": shared([]), **ONE_TENSOR}), "more values"),
    "tensors in lists": (lambda: saved(shared(torch.zeros(2))), "more values"),
    "dicts in dicts": (lambda: saved(shared(0, kind=lambda its: dict(enumerate(its)))), "more values"),
    "tuples as a key": (lambda: archive(b"\x80\x02}K\x01" + DOUBLED * 100 + b"Ns."), "copies or hashes more than"),
    "long texts": (lambda: saved({"a": ["x" * (1 << 20)] * 1000, **ONE_TENSOR}), "longer texts"),
    "depth": (lambda: archive(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."), "nested too deeply"),
    "an array of bytes": (
        lambda: archive(calling(b"__builtin__\nbytearray", HUGE)),
        "calls __builtin__.bytearray",
    ),
    "an empty tensor": (lambda: archive(calling(b"torch\nTensor", HUGE)), "calls torch.Tensor"),
    "a storage": (
        lambda: archive(calling(b"torch.storage\nUntypedStorage", HUGE)),
        "calls torch.storage.UntypedStorage",
    ),
    "a storage by a type": (
        lambda: archive(calling(b"torch._tensor\n_rebuild_from_type_v2", b"(" + STORAGE + STORAGE + HUGE + b"Nt")),
        "calls torch.storage.UntypedStorage",
    ),
    "a long name": (
        lambda: archive(b"\x80\x02}ctorch\n" + b"[" * 300_000 + b"\n."),
        "names a function or class by 300006 characters",
    ),
    "a negative size": (lambda: placed(-1, 1), "cannot be read"),
    "a size beyond arrays": (lambda: placed(1 << 62, 0), "no array can have the shape"),
    "a size beyond the file": (lambda: placed(1000, 1), "cannot be read"),
    "a new storage": (lambda: archive(b"\x80\x02" + STORAGE + HUGE + b"\x81."), "calls torch.storage.UntypedStorage"),
    "a quantized tensor": (
        lambda: archive(calling(b"torch._utils\n_rebuild_qtensor", b")")),
        "calls torch._utils._rebuild_qtensor",
    ),
    "copies of a list": (
        lambda: archive(b"\x80\x02]" + MANY + b"q\x00a" + b"ctorch\nSize\nh\x00\x85Ra" * 200 + b"."),
        "copies or hashes more than",
    ),
    "a set of a list again and again": (
        lambda: archive(b"\x80\x02]" + NUMBERS + b"q\x00a" + SET_OF_0 * 100 + b"."),
        "copies or hashes more than",
    ),
    "a list that grows after it was counted": (
        lambda: archive(
            b"\x80\x02]]q\x00\x85q\x01ah\x00" + NUMBERS[1:] + b"a" + b"cbuiltins\nset\nh\x01Ra" * 100 + b"."
        ),
        "fills a list or dict after its use",
    ),
    "a dict in another form": (
        lambda: archive(
            b"\x80\x02]ccollections\nOrderedDict\n)R(" + b"K\x01K\x02" * 20_000 + b"u}bq\x00a" + SET_OF_0 * 100 + b"."
        ),
        "copies or hashes more than",
    ),
    "a long list in itself": (lambda: saved(in_itself()), "such as one that is in itself, which is not taken"),
    "a number with items": (lambda: archive(b"\x80\x02K\x01(K\x01K\x02e."), "fills a list or dict after its use"),
    "keys of one hash": (
        lambda: archive(b"\x80\x02}(" + b"".join(big(number) for number in range(8, 1_200)) + b"u."),
        "copies or hashes more than",
    ),
    "tuples as keys": (lambda: saved({(number, 1): 0 for number in range(1_200)}), "copies or hashes more than"),
    "a set of tuples": (
        lambda: archive(calling(b"builtins\nset", b"](" + b"K\x01K\x02\x86" * 1_200 + b"e\x85")),
        "copies or hashes more than",
    ),
    "a tensor as a key": (lambda: saved({torch.zeros(2): 1, **ONE_TENSOR}), "a key is a Tensor"),
    "a tensor that repeats its elements": (
        lambda: saved({"x": torch.ones(1).expand(1 << 40)}),
        "share or repeat them to 4,398,046,511,104",
    ),
    "tensors that share a storage": (
        lambda: saved({str(number): ONE_TENSOR["w"].expand(1 << 28, 2) for number in range(3)}),
        "share or repeat them to 6,442,450,944",
    ),
    "many tensors": (lambda: saved({str(number): ONE_TENSOR["w"] for number in range(2000)}), "more than 1024 tensors"),
    "a compressed pickle": (
        lambda: archive(
            b"\x80\x02X" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20) + b".", method=zipfile.ZIP_DEFLATED
        ),
        "is compressed",
    ),
    "a compressed tensor": (
        lambda: archive(b"\x80\x02}.", [("data/0", bytes(1 << 20))], method=zipfile.ZIP_BZIP2),
        "is compressed",
    ),
    "a large pickle": (lambda: archive(b"\x80\x02" + b"N" * (3 << 20) + b"."), "its pickle has"),
    "many operations": (lambda: archive(b"\x80\x02" + b"}" * (1 << 16) + b"."), "more than 16384 operations"),
    "a directory of many": (
        lambda: archive(b"\x80\x02}.", [(f"{number:0400d}", b"") for number in range(1000)]),
        "its directory has",
    ),
    "a comment": (lambda: archive(b"\x80\x02}.", comment=b"x" * 22), "does not end as a zip file"),
    "two pickles": (lambda: archive(b"\x80\x02}.", [("DATA.pkl", b"\x80\x02}.")]), "two records have one name"),
    "bytes before it": (lambda: bytes(1000) + saved(ONE_TENSOR), "does not end as a zip file"),
    "no zip": (lambda: pickle.dumps({"w": 1}), "does not end as a zip file"),
    "nothing": (lambda: b"", "does not end as a zip file"),
    "a cut": (lambda: saved(ONE_TENSOR)[:-30], "does not end as a zip file"),
    "a pickle that ends": (lambda: archive(b"\x80\x02}"), "pickle exhausted before seeing STOP"),
    "a pickle without a stack": (lambda: archive(b"\x80\x02ts."), "its pickle is damaged"),
}


@pytest.mark.rest
@reads_torch_files
@pytest.mark.parametrize("name", TORCH)
def test_files_of_torch(tmp_path, monkeypatch, name):
    """With lower limits, which take less time to reach."""
    make, problem = TORCH[name]
    monkeypatch.setattr(torch_file, "_MAX_VALUES", 1 << 16)
    monkeypatch.setattr(torch_archive, "_MAX_COPIED", 1 << 20)
    monkeypatch.setattr(torch_archive, "_MAX_PICKLE_BYTES", 2 << 20)
    if name == "many operations":
        monkeypatch.setattr(torch_archive, "_MAX_OPERATIONS", 1 << 14)
    if name == "many tensors":
        monkeypatch.setattr(torch_file, "_MAX_TENSORS", 1 << 10)
    if name == "a directory of many":
        monkeypatch.setattr(torch_archive, "_MAX_DIRECTORY_BYTES", 1 << 18)
    (tmp_path / "x.pt").write_bytes(make())
    message = refused(tmp_path / "x.pt", tmp_path / "out")
    assert problem in message
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]


@reads_torch_files
def test_a_tensor_of_this_kind_that_fits_is_read(tmp_path):
    (tmp_path / "x.pt").write_bytes(placed(2, 1))
    assert ckpt.open(ckpt.import_file(tmp_path / "x.pt", tmp_path / "out"))["w"].read().tolist() == [0, 0]


@reads_torch_files
def test_large_sets_and_counters_of_plain_items_are_read(tmp_path):
    """Their hashes differ, so they may be as many as items of a list."""
    words = [f"word {number}" for number in range(20_000)]
    for content in (
        set(words),
        set(range(20_000)),
        Counter(dict.fromkeys(words, 3)),
        OrderedDict.fromkeys(words),
        {(1, "a")},
    ):
        (tmp_path / "x.pt").write_bytes(saved({"w": torch.ones(2), "vocabulary": content}))
        with open(tmp_path / "x.pt", "rb") as file:
            torch_archive.check(file)
        assert torch.load(tmp_path / "x.pt", weights_only=True)["vocabulary"] == content
    itself = []
    itself.append(itself)
    torch_archive.check(io.BytesIO(saved(itself)))


@reads_torch_files
def test_lists_that_are_shared_a_little_are_read(tmp_path):
    values = [torch.ones(2), 3]
    torch.save({"a": values, "b": values, "c": [values, {"d": values}]}, tmp_path / "x.pt")
    checkpoint = ckpt.open(ckpt.import_file(tmp_path / "x.pt", tmp_path / "out"))
    assert checkpoint.names == ["a/0", "b/0", "c/0/0", "c/1/d/0"]
    assert checkpoint.meta["torch"] == {"a/1": 3, "b/1": 3, "c/0/1": 3, "c/1/d/1": 3}


def test_an_old_torch_reads_no_file_of_a_stranger(tmp_path, monkeypatch, capsys):
    torch.save(ONE_TENSOR, tmp_path / "x.pt")
    for version in ("2.9.1+cpu", "2.7.0", "1.13"):
        monkeypatch.setattr(torch, "__version__", version)
        assert main(["import", str(tmp_path / "x.pt"), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert (
            said.count("\n") == 1 and f"torch is {version}; expected 2.10 or later" in said and "CVE-2026-24747" in said
        )
    for version in ("2.10.0", "2.10.0a0+git123", "2.13.0+cpu", "3.0"):
        assert torch_archive.version_error(version) is None
    assert os.listdir(tmp_path) == ["x.pt"]


# -- safetensors, and what is no file


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def holding(content):
    return lambda path: path.write_bytes(content)


def index(weight_map):
    return holding(b'{"metadata": {}, "weight_map": ' + weight_map + b"}")


def many_keys():
    names = [*(f"model.layers.{i}.weight" for i in range(60_000)), "model.layers.59999.weight"]
    return ", ".join(f'{json.dumps(name)}: "model-00001-of-00001.safetensors"' for name in names).encode()


def header(text, data=b""):
    return holding(len(text).to_bytes(8, "little") + text + data)


FOLDERS = {
    "a pipe": (ONE, pipe, "is a pipe; expected a regular file"),
    "a device": (ONE, device, "is a device; expected a regular file"),
    "an index that is a pipe": (INDEX, pipe, "is a pipe; expected a regular file"),
    "an index that is a device": (INDEX, device, "is a device; expected a regular file"),
    "an index that is a folder": (INDEX, lambda path: path.mkdir(), "is a folder; expected a regular file"),
    "an index of a terabyte": (INDEX, sparse, "expected at most"),
    "a deep index": (
        INDEX,
        index(b"[" * 100_000 + b"]" * 100_000),
        "index.json is damaged, or no index of weights: it is nested",
    ),
    "a deep object": (INDEX, holding(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "a key twice": (INDEX, index(b"{" + many_keys() + b"}"), "'model.layers.59999.weight' comes twice"),
    "many values": (INDEX, index(b"[" + b"[]," * 1_100_000 + b"[]]"), "values; expected at most"),
    "a list": (INDEX, index(b'["a"]'), "no weight_map"),
    "no object": (INDEX, holding(b"3"), "no weight_map"),
    "no file's name": (INDEX, index(b'{"x": 5}'), "5 is not the name of a file"),
    "a file above": (INDEX, index(b'{"x": ".."}'), "'..' is not the name of a file"),
    "a file with a long name": (INDEX, index(b'{"x": "' + b"a" * 5000 + b'"}'), "is not the name of a file beside it"),
    "a file for terminals": (INDEX, index(b'{"x": "\\u001b[31m"}'), "is not the name of a file"),
    "many files": (
        INDEX,
        index(b"{" + b",".join(b'"x%d": "%d.safetensors"' % (number, number) for number in range(20_000)) + b"}"),
        "names more than 16384 files",
    ),
    "a file that is not there": (INDEX, index(b'{"x": "a.safetensors"}'), "a.safetensors does not exist"),
    "a tensor that is not there": (INDEX, index(b'{"\\u001b]0;x": "model.safetensors.index.json"}'), "is damaged"),
    "a header of many values": (
        ONE,
        header(b'{"__metadata__":{"a":"' + b"," * (3 << 20) + b'"}}'),
        "values; expected at most",
    ),
    "a shape of many": (
        ONE,
        header(b'{"x":{"dtype":"U8","shape":[' + b"1," * 2_000_000 + b'1],"data_offsets":[0,1]}}', b"1"),
        "values; expected at most",
    ),
    "many groups": (
        ONE,
        header(
            json.dumps(
                {
                    "/".join([str(number), *"a" * 400]): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                    for number in range(100)
                }
            ).encode()
        ),
        "the names are in more than 16784 groups",
    ),
    "a deep header": (ONE, header(b"[" * 200_000), "is damaged, or no safetensors file"),
    "a name without end": (
        ONE,
        header(b'{"' + b"a" * (1 << 20) + b'":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', bytes(4)),
        "has 1048576 characters; expected at most 1024",
    ),
    "an empty tensor beyond HDF5": (
        ONE,
        header(b'{"x":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
        "no array can have the shape",
    ),
    "an empty tensor beyond arrays": (
        ONE,
        header(b'{"x":{"dtype":"F32","shape":[4611686018427387904,0],"data_offsets":[0,0]}}'),
        "",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(tmp_path, name):
    file, make, problem = FOLDERS[name]
    (tmp_path / "hf").mkdir()
    make(tmp_path / "hf" / file)
    assert problem in refused(tmp_path / "hf", tmp_path / "out")
    if file == ONE and (tmp_path / "hf" / file).is_file():
        assert problem in refused(tmp_path / "hf" / file, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".safetensors", ".json", ".pt"])
@pytest.mark.parametrize("make", [pipe, device])
def test_what_is_no_file(tmp_path, suffix, make):
    make(tmp_path / f"x{suffix}")
    if suffix == ".pt" and torch_archive.version_error(torch.__version__):
        pytest.skip("this torch reads no file of a stranger")
    assert "expected a regular file" in refused(tmp_path / f"x{suffix}", tmp_path / "out")


def test_the_links_of_a_cache_of_models_are_followed(tmp_path):
    """As in the cache of Hugging Face: the files of a model are links to others, elsewhere."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, name in enumerate(
        path.name for path in ckpt.export(
            ckpt.save(tmp_path / "a", {"x": np.full(5, 7.0), "y": np.ones(9)}, comm=None), tmp_path / "hf", shard_bytes=80
        )
    ):  # fmt: skip
        (tmp_path / "hf" / name).rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / str(number))
    assert len(list((tmp_path / "snapshot").iterdir())) == 3
    assert value_of(ckpt.import_file(tmp_path / "snapshot", tmp_path / "out", only="x")) == 7


def test_one_file_under_many_names_in_an_index(tmp_path):
    content = json.dumps(
        {f"t{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(3)}
    ).encode()
    header(content)(tmp_path / "0.safetensors")
    (tmp_path / "1.safetensors").symlink_to("0.safetensors")
    os.link(tmp_path / "0.safetensors", tmp_path / "2.safetensors")
    for other in (1, 2):
        index(b'{"t0": "0.safetensors", "t%d": "%d.safetensors"}' % (other, other))(tmp_path / INDEX)
        message = refused(tmp_path, tmp_path / "out")
        assert f"{other}.safetensors is the same file as {tmp_path}/0.safetensors" in message


@reads_torch_files
def test_conjugated_and_negated_views_take_no_memory(tmp_path):
    its = torch.randn(300, 7, dtype=torch.complex64)
    content = {
        "conj": its.conj(),
        "neg": its.clone().conj().imag,
        "both": torch._neg_view(its.conj()),
        "t": its.conj().T,
        "plain": its,
    }
    torch.save(content, tmp_path / "x.pt")
    checkpoint = ckpt.open(ckpt.import_file(tmp_path / "x.pt", tmp_path / "a"))
    for name, value in content.items():
        assert np.array_equal(checkpoint[name].read(), value.resolve_conj().resolve_neg().numpy())
    its = torch.zeros(1 << 21, dtype=torch.complex64)
    torch.save({str(number): its.view(2, -1).conj() for number in range(8)}, tmp_path / "x.pt")
    before = forget_peak()
    ckpt.import_file(tmp_path / "x.pt", tmp_path / "b")
    assert peak_bytes() - before < 96 << 20  # 128 MiB at once
