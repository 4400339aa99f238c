"""Arrays that are views, and arrays without elements: saved, loaded and read by every tool, bit for bit."""

import json
from collections.abc import Callable
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.views import shares_elements


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)


def conjugated(*shape: int) -> torch.Tensor:
    return torch.complex(numbers(*shape), numbers(*shape) + 0.5).conj()


def turned(x: Any) -> Any:
    return x.T


VIEWS: dict[str, Callable[[], Any]] = {
    "conjugated": lambda: conjugated(3),
    "conjugated and turned": lambda: turned(conjugated(2, 3)),
    "conjugated scalar": lambda: conjugated(1)[0],
    "negated": lambda: conjugated(3).imag,
    "negated and contiguous": lambda: torch._neg_view(numbers(4)),
    "turned": lambda: turned(numbers(2, 3)),
    "turned bfloat16": lambda: turned(numbers(2, 3).to(torch.bfloat16)),
    "turned float8": lambda: turned(numbers(2, 3).to(torch.float8_e4m3fn)),
    "every second": lambda: numbers(4, 6)[1:, ::2],
    "a parameter": lambda: torch.nn.Parameter(turned(numbers(2, 3))),
    "turned, of NumPy": lambda: turned(np.arange(6.0).reshape(2, 3)),
    "in Fortran's order": lambda: np.asfortranarray(np.arange(12.0).reshape(2, 2, 3)),
    "backwards": lambda: np.arange(5)[::-1],
    "a field": lambda: np.arange(12, dtype="i2").view([("a", "i2"), ("b", "i4")])["b"],
    "bfloat16 of NumPy": lambda: turned(np.arange(6.0).reshape(2, 3).astype(ml_dtypes.bfloat16)),
    "no rows, turned": lambda: turned(torch.ones(4, 0)),
}
EXPANDED: dict[str, Callable[[], Any]] = {
    "expanded": lambda: numbers(1).expand(4),
    "an expanded scalar": lambda: torch.tensor(7).expand(2, 3),
    "expanded and conjugated": lambda: conjugated(1).expand(2),
    "overlapping": lambda: numbers(6).unfold(0, 3, 1),
    "broadcast": lambda: np.broadcast_to(np.float32(3), (2, 3)),
}
EMPTY = [(0,), (0, 3), (3, 0), (0, 2, 5), (2, 0, 5), (1, 0)]


def values(x: Any) -> tuple[tuple[int, ...], bytes]:
    if isinstance(x, torch.Tensor):
        plain = x.detach().resolve_conj().resolve_neg().contiguous()
        return tuple(x.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return x.shape, x.tobytes()


def spoiled(x: Any) -> Any:
    """The view with other values."""
    if isinstance(x, torch.Tensor):
        x.detach().copy_(torch.zeros(x.shape, dtype=x.dtype))
    else:
        x[...] = np.zeros(x.shape, x.dtype)
    return x


@pytest.mark.parametrize("background", [False, True])
def test_views_come_back(tmp_path, background):
    path = ckpt.save(tmp_path / "a", {name: made() for name, made in (VIEWS | EXPANDED).items()}, background=background)
    ckpt.wait()
    checkpoint = ckpt.open(path)
    for name, made in (VIEWS | EXPANDED).items():
        assert values(checkpoint[name].read()) == values(made()), name
    views = {name: spoiled(made()) for name, made in VIEWS.items()}
    ckpt.load(path, views, strict=False)
    for name, made in VIEWS.items():
        assert values(views[name]) == values(made()), name
    for name, made in EXPANDED.items():
        with pytest.raises(ValueError, match=f"^tensor '{name}' cannot be filled: some of its elements share memory"):
            ckpt.load(path, {name: made()}, strict=False)


def test_a_part_and_a_cast_into_a_view(tmp_path):
    whole = np.arange(12.0).reshape(3, 4)
    path = ckpt.save(tmp_path / "a", {"x": ckpt.Shard(whole.T, (4, 3), (0, 0))})
    part = np.zeros((3, 2), np.float32).T
    ckpt.load(path, {"x": ckpt.Shard(part, (4, 3), (1, 0))}, cast=True)
    assert np.array_equal(part, whole.T[1:3])


def test_what_shares_elements():
    for made in (*VIEWS.values(), *EXPANDED.values()):
        x = made()
        strides = x.stride() if isinstance(x, torch.Tensor) else x.strides
        expected = made in EXPANDED.values()
        assert shares_elements(x.shape, strides, 1 if isinstance(x, torch.Tensor) else x.itemsize) == expected
    assert not shares_elements((0, 5), (0, 0)) and not shares_elements((), ()) and not shares_elements((1, 1), (0, 0))


@pytest.mark.parametrize("beside", [{}, {"x": np.arange(3.0)}])
def test_tensors_without_elements(tmp_path, capsys, beside):
    tensors = {f"{dtype}/{i}": torch.ones(s).to(getattr(torch, dtype)) for dtype in ("float32", "bfloat16", "bool")
               for i, s in enumerate(EMPTY)} | beside  # fmt: skip
    path = ckpt.save(tmp_path / "a", tensors)
    found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items() if name != "x"}
    ckpt.load(path, found, strict=False)
    checkpoint = ckpt.open(path)
    with h5py.File(path / "index.h5") as file:
        for name, value in tensors.items():
            assert checkpoint[name].shape == checkpoint[name].read().shape == tuple(value.shape)
            assert file[name].shape == file[name][()].shape == tuple(value.shape)
    for arguments in (
        ["show", path], ["show", path, "--stats"], ["verify", path], ["diff", path, path], ["ls", tmp_path],
        ["export", path, tmp_path / "b.safetensors"], ["import", tmp_path / "b.safetensors", tmp_path / "c"],
        ["reshard", "--files", "one", path, tmp_path / "d"], ["diff", path, tmp_path / "d"], ["diff", path, tmp_path / "c"],
    ):  # fmt: skip
        assert main([str(argument) for argument in arguments]) in (0, None), arguments
    capsys.readouterr()
    assert main(["show", str(path), "--json"]) in (0, None)
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == len(tensors)
