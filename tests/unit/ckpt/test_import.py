"""Checkpoints made of the files of others, as their own libraries write them; files that are damaged, or made to harm."""

import json
import os
import pickle
from fractions import Fraction
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from checkpoints import printed
from safetensors.torch import save_file
from some_tensors import (
    SAFETENSORS,
    TORCH,
    as_torch,
    equal,
    everything,
    forget_peak,
    peak_bytes,
    random_array,
    reads_torch_files,
)

import ckpt
from ckpt.cli import main
from ckpt.convert import importing
from ckpt.reading import sources
from ckpt.saving import describing, writer
from collectives.arrays.buffer import as_numpy


def assert_holds(path, tensors):
    checkpoint = ckpt.open(path)
    assert checkpoint.names == sorted(tensors)
    assert all(equal(checkpoint[name].read(), array) for name, array in tensors.items())
    assert ckpt.verify(path) == []


@pytest.mark.parametrize("name", ["a.safetensors", pytest.param("a.pt", marks=reads_torch_files)])
@pytest.mark.parametrize("files", ["one", 3])
def test_every_dtype_and_shape_bit_for_bit(tmp_path, name, files):
    tensors = everything(SAFETENSORS if name == "a.safetensors" else TORCH)
    given = {label: as_torch(array) for label, array in tensors.items()}
    (save_file if name == "a.safetensors" else torch.save)(given, tmp_path / name)
    path = ckpt.import_file(tmp_path / name, tmp_path / "step-3", meta={"step": 3}, files=files)
    assert path == tmp_path / "step-3" and ckpt.latest(tmp_path) == path
    assert_holds(path, tensors)
    assert ckpt.open(path).meta == {"step": 3}
    assert len(ckpt.open(path).files) == (2 if files == "one" else 4)


@pytest.mark.parametrize("of", ["folder", "index"])
def test_a_model_in_several_files(tmp_path, of):
    tensors = {f"blocks.{i}.w": random_array("bfloat16", (3, 5), seed=i) for i in range(4)}
    path = ckpt.save(tmp_path / "c", tensors, comm=None)
    ckpt.export(path, tmp_path / "hf", shard_bytes=60)
    source = tmp_path / "hf" if of == "folder" else tmp_path / "hf" / "model.safetensors.index.json"
    made = ckpt.import_file(source, tmp_path / "d", prefix="model/", only="blocks.[0-2].*")
    assert_holds(made, {f"model/{name}": array for name, array in tensors.items() if "3" not in name})


@reads_torch_files
def test_a_state_of_torch_becomes_paths(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    model[1].bias = model[1].bias  # registered anew, the same
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.5)
    model[0](torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x", "none": None}
    torch.save(state, tmp_path / "a.pt")
    checkpoint = ckpt.open(ckpt.import_file(tmp_path / "a.pt", tmp_path / "c", meta={"step": 9}))
    assert equal(checkpoint["model/0.weight"].read(), as_numpy(model[0].weight))
    assert equal(checkpoint["model/1.weight"].read(), as_numpy(model[1].weight))
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert equal(checkpoint["optimizer/state/0/exp_avg"].read(), as_numpy(moment))
    meta = checkpoint.meta
    assert meta["step"] == 9
    assert {name: meta["torch"][name] for name in ("epoch", "name", "none")} == {"epoch": 3, "name": "x", "none": None}
    assert meta["torch"]["optimizer/param_groups/0/lr"] == 0.5


@reads_torch_files
def test_views_of_a_storage(tmp_path, monkeypatch):
    """In pieces of 128 bytes, with a checksum for each 64."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 128)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 64)
    monkeypatch.setattr(describing, "Manifest", partial(describing.Manifest, chunk_bytes=64))
    whole = torch.arange(60.0).reshape(6, 10)
    views = {
        "turned": whole.T,
        "columns": whole[:, 3:5],
        "half": whole.bfloat16().T[::2],
        "tied": whole,
        "parameter": torch.nn.Parameter(whole[2:]),
        "truth": (whole > 7).T,
        "expanded": whole[:, :1].expand(6, 300),
        "one": torch.ones(()).expand(2, 3),
        "turned float8": whole.to(torch.float8_e4m3fn).T,
        "expanded complex": torch.complex(whole[:1], whole[1:2]).expand(50, 10),
        "conjugate": torch.complex(whole, whole + 1).T.conj(),
        "imaginary": torch.complex(whole, whole + 1).conj().imag,
    }
    torch.save(views, tmp_path / "a.pt")
    path = ckpt.import_file(tmp_path / "a.pt", tmp_path / "c", files=4)
    assert_holds(
        path, {name: as_numpy(view.detach().contiguous().resolve_conj().resolve_neg()) for name, view in views.items()}
    )


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@reads_torch_files
def test_a_file_without_checksums_of_its_records(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(5)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    path = ckpt.import_file(tmp_path / "x.pt", tmp_path / "a")
    assert ckpt.open(path)["x"].read().tolist() == [0, 1, 2, 3, 4]


@reads_torch_files
def test_no_code_of_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2), "y": Harm()}, "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Harm()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match=r"cannot be read by torch\.load\(weights_only=True, mmap=True\)"):
            ckpt.import_file(name, "c")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


@reads_torch_files
def test_torchs_reason_without_its_advice(tmp_path):
    odd = type("Odd\x1b[31m", (), {"__module__": __name__})
    for kind, why in (
        (Fraction, "GLOBAL fractions.Fraction was not an allowed global"),
        (Harm, "GLOBAL posix.mkdir whose"),
    ):
        torch.save({"x": torch.ones(2), "y": kind()}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=f"mmap=True\\): [^(]*{why}") as raised:
            ckpt.import_file(tmp_path / "a.pt", tmp_path / "c")
        text = str(raised.value)
        assert text.isprintable() and "two options" not in text and "trust" not in text and text.count("expected") == 1
    with patch.dict(globals(), {odd.__qualname__: odd}):  # a name that plays tricks on terminals
        torch.save({"y": odd()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"Odd\\x1b\[31m was not an") as raised:
        ckpt.import_file(tmp_path / "a.pt", tmp_path / "c")
    assert str(raised.value).isprintable()


ONE = torch.ones(2)
CYCLE = {"x": ONE}
CYCLE["itself"] = CYCLE


@reads_torch_files
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"x": ONE.byte().view(torch.bits8)},
            r"'x' has dtype torch\.bits8; expected one of float64.*only=",
        ),
        ({"x": torch.ones(2).to_sparse()}, "'x' is a torch.sparse_coo tensor"),
        ({"x": {1: ONE, "1": ONE}}, r"a\.pt: \['x'\]\[1\] and \['x'\]\['1'\] are both called 'x/1' in a checkpoint"),
        ({"a/b": ONE, "a": {"b": ONE}}, r"\['a/b'\] and \['a'\]\['b'\] are both called 'a/b'"),
        ({True: ONE, "True": ONE}, r"\[True\] and \['True'\] are both called 'True'"),
        ({"x": [ONE], "x/0": ONE}, r"\['x'\]\[0\] and \['x/0'\] are both called 'x/0'"),
        ({"x": ONE, "lr": {0: 0.1, "0": 0.2}}, r"\['lr'\]\[0\] and \['lr'\]\['0'\] are both called 'lr/0'"),
        ({0: ONE, "0": 5}, r"\[0\] and \['0'\] are both called '0'"),
        (ONE, r"a\.pt holds a bare tensor, which has no name; expected a dict of tensors: torch\.save\("),
        (CYCLE, r"a\.pt is nested too deeply, or holds a dict or a list that contains itself"),
        ([1, 2], r"a\.pt holds no tensor"),
        ({}, r"a\.pt holds no tensor"),
        ({"x": {1, 2}}, "'x' is a set; expected a tensor"),
        ({"x/": torch.ones(2)}, "the name 'x/' is no path of groups"),
        ({"x": torch.ones(2), "x/y": torch.ones(2)}, "'x' is a tensor and also the group of 'x/y'"),
        ({"x": torch.ones((1,) * 33)}, "33 dimensions; HDF5 knows at most 32"),
    ],
)
def test_what_a_checkpoint_cannot_hold(tmp_path, content, message):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=message):
        ckpt.import_file(tmp_path / "a.pt", tmp_path / "c")
    assert os.listdir(tmp_path) == ["a.pt"]


@reads_torch_files
def test_a_tensor_that_repeats_its_elements_to_more_than_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "_MORE_BYTES", 1 << 60)
    torch.save({"x": torch.ones(1).expand(1 << 50)}, tmp_path / "a.pt")
    with pytest.raises(OSError, match=r"No space left on device: 4,503,599,627,370,496 bytes are to be written"):
        ckpt.import_file(tmp_path / "a.pt", tmp_path / "c")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_safetensors_that_cannot_be_used(tmp_path):
    file = tmp_path / "a.safetensors"
    head = b'{"x":{"dtype":"F32","shape":[20],"data_offsets":[0,80]},"y":{"dtype":"F4","shape":[2],"data_offsets":[80,81]}}'
    file.write_bytes(len(head).to_bytes(8, "little") + head + np.ones(20, "f4").tobytes() + b"\0")
    out = tmp_path / "c"
    with pytest.raises(ValueError, match=r"y in .* has dtype F4; a checkpoint has one of float64.*only="):
        ckpt.import_file(file, out)
    assert_holds(ckpt.import_file(file, out, only="x"), {"x": np.ones(20, "f4")})
    with pytest.raises(FileExistsError, match="exists"):
        ckpt.import_file(file, out, only="x")
    good = file.read_bytes()
    for bad in (good[:-1], good[:20], b"", b"\xff" * 100, good.replace(b"[20]", b"[99]")):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged, or no safetensors file"):
            ckpt.import_file(file, out, overwrite=True)
    assert_holds(out, {"x": np.ones(20, "f4")})
    file.write_bytes(good)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ckpt.import_file(tmp_path / "no.safetensors", out)
    with pytest.raises(FileNotFoundError, match="has neither"):
        ckpt.import_file(out, tmp_path / "d")
    with pytest.raises(FileNotFoundError):
        ckpt.import_file(tmp_path / "no.pt", out)
    with pytest.raises(ValueError, match=r"suffix '\.npz'; expected one of \.safetensors"):
        ckpt.import_file(tmp_path / "a.npz", out)
    with pytest.raises(ValueError, match="files is 0; expected 'one', or a number"):
        ckpt.import_file(file, out, only="x", files=0)
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="is not the name of a file beside it"):
        ckpt.import_file(tmp_path / "i.json", out)


def test_safetensors_with_a_name_that_comes_twice(tmp_path):
    """Its own library takes the last of them."""
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    head = f'{{"x":{entry},"x":{entry}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged: the name 'x' comes twice"):
        ckpt.import_file(tmp_path / "a.safetensors", tmp_path / "c")
    save_file({"x": ONE}, tmp_path / "a.safetensors")
    (tmp_path / "i.json").write_text('{"weight_map": {"x": "b.safetensors", "x": "a.safetensors"}}')
    with pytest.raises(ValueError, match=r"i\.json is damaged.*: the name 'x' comes twice"):
        ckpt.import_file(tmp_path / "i.json", tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.rest
def test_memory_is_bounded(tmp_path):
    big = np.zeros((32, 1 << 20), "f4")  # 128 MiB
    ckpt.export(ckpt.save(tmp_path / "a", {"big": big}, comm=None), tmp_path / "a.safetensors")
    del big
    before = forget_peak()
    ckpt.import_file(tmp_path / "a.safetensors", tmp_path / "b", files=3)
    assert peak_bytes() - before < 2 * sources.PIECE_BYTES


def test_the_command(tmp_path, capsys):
    save_file({"w": torch.ones(2, 3), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    args = ["import", str(tmp_path / "a.safetensors"), str(tmp_path / "run" / "checkpoints" / "start")]
    said = printed(capsys, *args, "--prefix", "model/", "--step", 0)
    assert "2 tensors, 32 B, in 1 data file; read back and whole" in said
    assert ckpt.open(ckpt.find(tmp_path / "run")).names == ["model/b", "model/w"]
    found = json.loads(printed(capsys, *args, "--overwrite", "--only", "w", "--files", 2, "--json"))
    assert (found["tensors"], found["meta"], list(found["files"])) == (
        1, {}, ["part-00000.h5", "part-00001.h5", "index.h5"]
    )  # fmt: skip
    assert main(args) == 2
    err = capsys.readouterr().err
    assert "exists" in err and "--overwrite" in err and "overwrite=" not in err
    with pytest.raises(SystemExit):
        main([*args, "--overwrite", "--step", "-1"])
    assert "'-1'; expected a whole number of at least 0" in capsys.readouterr().err
    assert main([*args[:2], str(tmp_path / "step-00000009"), "--step", "7"]) == 2
    assert "--step 7, but the name 'step-00000009' says 9; expected the same" in capsys.readouterr().err
    printed(capsys, *args[:2], tmp_path / "step-00000009", "--step", 9)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    assert main([*args, "--overwrite"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
