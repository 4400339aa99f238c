"""Weights from safetensors files into shards, and out of them."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import Residual
from safetensors.torch import load_file, save_file
from sharded_models import STORAGES, shard
from some_tensors import forget_peak, peak_bytes
from torch import nn
from ways import WAYS

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.weights.whole import files

pytestmark = pytest.mark.ranks(1, 2, 3)


class Model(nn.Module):
    """A stack of layers, tied weights, a scalar, a row, an integer buffer, a frozen part."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.inward = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5 + seed))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.outward = nn.Linear(6, 6, bias=False)
        self.outward.weight = self.inward.weight
        self.register_buffer("shift", torch.arange(5.0) + seed)
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x) + self.row
        for layer in self.layers:
            x = layer(x)
        return self.frozen(self.outward(x) * self.scale) + self.shift


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """As the files have it: tied weights once."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != "outward.weight"}


def write(comm: Communicator, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with comm.together():
        if comm.rank == 0:
            path.parent.mkdir(exist_ok=True)
            save_file(tensors, path)


def write_parts(comm: Communicator, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In two files and an index."""
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        write(comm, folder / f"model-0000{i + 1}-of-00002.safetensors", {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, f"model-0000{i + 1}-of-00002.safetensors")
    with comm.together():
        if comm.rank == 0:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_like(comm: Communicator, model: nn.Module, plain: nn.Module) -> None:
    full = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert full.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_loaded_between_steps(comm: Communicator, shared_tmp: Path, way: str) -> None:
    model, plain = shard(Model(1), comm, way), Model(2)
    write(comm, shared_tmp / "w.safetensors", untied(plain))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    model(x)  # without a backward: the root's parameters stay gathered
    passed_over = mpitrain.load_weights(model, shared_tmp / "w.safetensors")
    assert passed_over == ([], [])
    assert_like(comm, model, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        optimizer.zero_grad()
        m(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["stage 2, private", "stage 3", "stage 3, private"])
def test_weights_that_were_not_freed_after_forward_are_not_used_again(
    comm: Communicator, shared_tmp: Path, way: str
) -> None:
    plain = Model(2)
    model = shard(Model(1), comm, way, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.zeros(3, 6))
    write(comm, shared_tmp / "w.safetensors", untied(plain))
    mpitrain.load_weights(model, shared_tmp / "w.safetensors")
    assert_like(comm, model, plain)


@pytest.mark.parametrize("kind", ["folder of one", "folder of parts", "index", "list"])
def test_what_a_path_may_be(comm: Communicator, shared_tmp: Path, kind: str) -> None:
    model, plain = shard(Model(1), comm, "stage 3"), Model(2)
    tensors = untied(plain)
    path: Any = shared_tmp / "there"
    if kind == "folder of one":
        write(comm, path / "model.safetensors", tensors)
    else:
        write_parts(comm, path, tensors)
    if kind == "index":
        path = path / "model.safetensors.index.json"
    elif kind == "list":
        path = sorted(str(file) for file in path.glob("*.safetensors"))
    mpitrain.load_weights(model, path)
    assert_like(comm, model, plain)


def test_a_path_at_home(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shared_tmp))
    model, other = shard(Model(2), comm, "stage 3"), shard(Model(3), comm, "stage 3")
    mpitrain.export_weights(model, "~/out")
    mpitrain.export_weights(model, "~/one.safetensors")
    assert sorted(path.name for path in shared_tmp.iterdir()) == ["one.safetensors", "out"]
    mpitrain.load_weights(other, "~/out")
    assert_like(comm, other, Model(2))
    mpitrain.load_weights(other, ["~/one.safetensors"])


def test_a_torch_without_some_dtypes_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6, which has no float8_e8m0fnu."""
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    known = runpy.run_path(files.__file__)["DTYPES"]
    assert known["F8_E5M2"] == torch.float8_e5m2 and "F8_E8M0" not in known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_cast_and_names_changed(comm: Communicator, shared_tmp: Path, dtype: torch.dtype) -> None:
    model, plain = shard(Model(1), comm, "stage 3"), Model(2)
    for value in (*plain.parameters(), plain.shift):
        value.data = value.data.to(dtype).float()  # to what the file can hold
    tensors = {
        f"transformer.{'head.weight' if name == 'outward.weight' else name}": value.to(dtype)
        if value.is_floating_point()
        else value
        for name, value in plain.state_dict().items()
        if name != "inward.weight"  # under the other of its names
    }
    write(comm, shared_tmp / "w.safetensors", tensors | {"mask": torch.zeros(2)})

    def rename(name: str) -> str | None:
        return None if name == "mask" else name.removeprefix("transformer.").replace("head", "outward")

    mpitrain.load_weights(model, shared_tmp / "w.safetensors", rename=rename)
    assert_like(comm, model, plain)
    other = shard(Model(1), comm, "stage 3")
    mpitrain.load_weights(
        other, shared_tmp / "w.safetensors", rename={name: rename(name) for name in (*tensors, "mask")}
    )
    assert_like(comm, other, plain)


def test_what_does_not_fit_changes_nothing(comm: Communicator, shared_tmp: Path) -> None:
    model, before, plain = shard(Model(1), comm, "stage 3"), Model(1), Model(2)
    file = shared_tmp / "w.safetensors"
    tensors = untied(plain)
    tensors["new"] = tensors.pop("scale")

    def fails(text: str, path: Any = file, kind: type[Exception] = ValueError, **options: Any) -> None:
        comm.barrier()
        with pytest.raises(kind, match=re.escape(text)):
            mpitrain.load_weights(model, path, **options)
        assert_like(comm, model, before)
        comm.barrier()

    write(comm, file, tensors)
    fails("load_weights: the files lack scale and have new that the model does not have")
    fails("row occurs twice: ", rename={"new": "row"})
    fails(f"of {file} and count of {file}", path=[file, file])
    write(comm, file, untied(plain) | {"frozen.weight": torch.zeros(6, 5)})
    fails(f"frozen.weight has shape (6, 5) in {file}; expected (5, 6)")
    write(comm, file, untied(plain) | {"frozen.bias": torch.zeros(5, dtype=torch.int8)})
    fails("frozen.bias is torch.int8 in")
    with comm.together():
        if comm.rank == 0:
            file.write_bytes(file.read_bytes()[:-8])
    fails(f"{file} is damaged, or no safetensors file")
    fails(f"{shared_tmp / 'none'} does not exist", path=shared_tmp / "none", kind=FileNotFoundError)
    fails("has neither model.safetensors nor", path=shared_tmp, kind=FileNotFoundError)
    twice = shared_tmp / "twice.safetensors"
    row = b'"row": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = b"{" + row + b", " + row + b"}"
    twice.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    fails(f"{twice} is damaged: the name 'row' comes twice", path=twice)
    fails("b'file' is no path", path=b"file", kind=TypeError)
    fails("path is memory://run; expected a file or a folder on a disk", path="memory://run")
    (shared_tmp / "model.safetensors.index.json").write_text('{"weight_map": {"row": "../w.safetensors"}}')
    fails("is not the name of a file beside it", path=shared_tmp)
    write(comm, file, tensors)
    assert mpitrain.load_weights(model, file, strict=False) == (["scale"], ["new"])
    after = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert after["scale"] == before.scale
        assert torch.equal(after["row"], plain.row)


def test_within_unshard_it_is_an_error(comm: Communicator, shared_tmp: Path) -> None:
    model = shard(Model(1), comm, "stage 3")
    write(comm, shared_tmp / "w.safetensors", untied(Model(2)))
    with mpitrain.unshard(model), pytest.raises(RuntimeError, match="within unshard"):
        mpitrain.load_weights(model, shared_tmp / "w.safetensors")
    assert_like(comm, model, Model(1))


def test_plain_models_and_models_on_the_meta_device(comm: Communicator, shared_tmp: Path) -> None:
    plain, other = Model(1), Model(2)
    write(comm, shared_tmp / "w.safetensors", untied(other))
    mpitrain.load_weights(plain, shared_tmp / "w.safetensors")
    assert_like(comm, plain, other) if comm.rank == 0 else None
    with torch.device("meta"):
        model = Model(1)
    with pytest.raises(ValueError, match="on the meta device and has no memory"):
        mpitrain.load_weights(model, shared_tmp / "w.safetensors")
    fully_shard(model, comm)
    mpitrain.load_weights(model, shared_tmp / "w.safetensors")
    assert_like(comm, model, other)


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("max_file_bytes", [10**9, 300])
def test_weights_are_exported(comm: Communicator, shared_tmp: Path, way: str, max_file_bytes: int) -> None:
    model, plain = shard(Model(2), comm, way), Model(2)
    folder = shared_tmp / "out"
    mpitrain.export_weights(model, folder, max_file_bytes=max_file_bytes)
    with pytest.raises(FileExistsError, match="exists already; overwrite=True"):
        mpitrain.export_weights(model, folder)
    names = sorted(path.name for path in folder.iterdir())
    read = {}
    for path in folder.glob("*.safetensors"):
        part = load_file(path)
        read |= part
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= max_file_bytes
    assert read.keys() == untied(plain).keys()
    for name, value in untied(plain).items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=0)
    if max_file_bytes == 300:
        assert (
            names[-1] == "model.safetensors.index.json"
            and names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
        )
    else:
        assert names == ["model.safetensors"]
    other = shard(Model(3), comm, way)
    mpitrain.load_weights(other, folder)
    assert_like(comm, other, plain)
    mpitrain.export_weights(other, folder, dtype=torch.bfloat16, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(folder / "model.safetensors")["row"], plain.row.bfloat16())


def test_an_export_that_fails_leaves_nothing_and_hangs_nobody(comm: Communicator, shared_tmp: Path) -> None:
    model = shard(Model(2), comm, "stage 3")
    with comm.together():
        if comm.rank == 0:
            (shared_tmp / ".out.safetensors.tmp").mkdir()  # where it would be written
    with pytest.raises(OSError, match=r"out\.safetensors cannot be written: Is a directory"):
        mpitrain.export_weights(model, shared_tmp / "out.safetensors")
    with pytest.raises(ValueError, match="path is memory://run; expected a file or a folder on a disk"):
        mpitrain.export_weights(model, "memory://run")
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        mpitrain.export_weights(model, shared_tmp / "there", max_file_bytes=0)
    with comm.together():
        if comm.rank == 0:
            ckpt.save(shared_tmp / "saved", {}, comm=None)
    with pytest.raises(ValueError, match="saved is a checkpoint, in which nothing is ever changed"):
        mpitrain.export_weights(model, shared_tmp / "saved")
    with comm.together():
        if comm.rank == 0:
            shutil.rmtree(shared_tmp / "saved")
            (shared_tmp / "latest").unlink()
    assert [path.name for path in shared_tmp.iterdir()] == [".out.safetensors.tmp"]
    assert_like(comm, model, Model(2))


@pytest.mark.rest
@pytest.mark.parametrize("storage", STORAGES)
def test_no_rank_holds_the_whole(comm: Communicator, shared_tmp: Path, storage: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))  # 4 MB each
    fully_shard(model, comm, storage=storage)
    whole = 4 * mpitrain.num_parameters(model)
    for param in model.parameters():
        nn.init.ones_(param)  # what is touched now is not counted below
    mpitrain.export_weights(model, shared_tmp / "w")  # MPI allocates at the first messages
    comm.barrier()
    before = forget_peak()
    mpitrain.export_weights(model, shared_tmp / "w", max_file_bytes=5 * 2**22, overwrite=True)
    grown = peak_bytes() - before
    # Rank 0 has a piece of one rank's rows at a time, at most 4 MB here, the others send theirs from where they are.
    assert grown < whole / 4, (grown, whole)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    comm.barrier()
    before = forget_peak()
    mpitrain.load_weights(model, shared_tmp / "w")
    grown = peak_bytes() - before
    # The pages of the files that it has read: its own rows.
    assert grown < whole / comm.size + whole / 8, (grown, whole)
    assert all(bool((param == 1).all()) for param in model.parameters())
