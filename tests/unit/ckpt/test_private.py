"""Who may read a checkpoint, and where its temporary files may be."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt

TENSORS = {"a": np.arange(4.0)}


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The one that most systems have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("background", [False, True])
def test_a_private_checkpoint_and_its_copy_are_for_one_user(tmp_path: Path, background: bool) -> None:
    path, copy = tmp_path / "run" / "step-1", tmp_path / "copies"
    for private in (False, True, False):  # each replaces the one before
        ckpt.save(path, TENSORS, private=private, copies=[copy], overwrite=True, background=background)
        ckpt.wait()
        expected = 0o700 if private else 0o755
        assert (mode(path), mode(copy / "step-1")) == (expected, expected)
        assert mode(path / "manifest.jsonl") == 0o644 and mode(path.parent) == 0o755
        assert {name.name for name in path.parent.iterdir()} == {"step-1", "latest"}
    assert ckpt.open(path)["a"].read().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["a.safetensors", "a.h5", "a.npz"])
def test_an_export_does_not_write_through_a_link(tmp_path: Path, name: str) -> None:
    ckpt.save(tmp_path / "step-1", TENSORS)
    (tmp_path / "precious").write_text("keep")
    (tmp_path / f".{name}.tmp").symlink_to(tmp_path / "precious")
    ckpt.export(tmp_path / "step-1", tmp_path / name)
    assert (tmp_path / "precious").read_text() == "keep" and not (tmp_path / name).is_symlink()
