"""`sample` with a checkpoint of its own run, and with those of strangers, whose meta says anything."""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forging import forge
from some_tensors import forget_peak, peak_bytes

import ckpt
from mpitrain.cli import main
from mpitrain.job.config import Config, parse, to_toml
from mpitrain.job.train import sampling, stop
from mpitrain.job.train.sampling import sample, written
from mpitrain.models import build
from mpitrain.weights import state

MAX_GROWN_BYTES, MAX_SECONDS = 300 << 20, 10


def small(*words: str) -> Config:
    return parse(["--model.width", "16", "--model.layers", "2", "--model.heads", "2", "--model.context", "16", *words])


def meta_of(config: Config) -> dict[str, Any]:
    return {"step": 1, "config": to_toml(config), "data": {"fingerprint": "x", "next_sample": 0}, "num_ranks": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = small()
    state.save(tmp_path / "step-1", build(config.model.resolve()), meta=meta_of(config))
    return tmp_path / "step-1"


def test_it_draws_bytes(path: Path) -> None:
    """A model without training: each byte is as likely as any other."""
    drawn = "".join(sample(str(path), "ab", num=4, temperature=1.0, seed=3))
    assert drawn.startswith("ab") and len(drawn) > 2
    assert drawn == "".join(sample(str(path), "ab", num=4, temperature=1.0, seed=3))


class AtTheEnd:
    """What `written` does with pieces of one rank."""

    def __init__(self, pieces: Iterable[str], *, num: int = 5, limit_s: float = math.inf) -> None:
        self.lines: list[str] = []
        self.text = written(
            iter(pieces), num=num, limit_s=limit_s, sum_of_ranks=lambda *values: [float(v) for v in values], rank=0,
            say=self.lines.append,
        )  # fmt: skip


PIECES = ["ab", "c", "", "d", "e", "f", "rest"]


def test_the_sample_at_the_end_is_whole_if_nothing_ends_it() -> None:
    whole = AtTheEnd(PIECES)
    assert (whole.text, whole.lines) == ("abcdefrest", [])


def test_the_sample_at_the_end_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_TOLD_EVERY_S", -1.0)
    assert AtTheEnd(PIECES[:3]).lines == ["0 of 5 bytes", "1 of 5 bytes", "2 of 5 bytes"]


def test_the_sample_at_the_end_ends_at_its_limit() -> None:
    late = AtTheEnd(PIECES, limit_s=-1.0)
    assert late.text == "ab"
    assert late.lines == [
        "the sample ends after 0 of 5 bytes: -1 s are over; --train.sample-bytes 5 sets no limit of time"
    ]


def test_the_sample_at_the_end_ends_at_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[str]:
        for number, piece in enumerate(PIECES):
            if number == 3:
                monkeypatch.setattr(stop, "_requested", True)
            yield piece

    stopped = AtTheEnd(pieces())
    assert (stopped.text, stopped.lines) == ("abcd", ["the sample ends after 3 of 5 bytes: as asked"])


def refused(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line by which the command refuses it."""
    before, start = forget_peak(), time.monotonic()
    assert main(["sample", "--checkpoint", str(path), *words]) == 1
    assert time.monotonic() - start < MAX_SECONDS and peak_bytes() - before < MAX_GROWN_BYTES
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mpitrain: error: ") and err.count("\n") == 1 and len(err) < 2000
    return err


def forged(path: Path, **changes: Any) -> None:
    forge(path, lambda header, meta, tensors: meta.update(changes))


SIZES = {
    "width": (["--model.width", "1000000"], "wte.weight would have the shape .256, 1000000., and it has .256, 16."),
    "layers": (["--model.layers", "1000000000"], "1000000000 layers, and"),
    "one layer more": (["--model.layers", "3"], r"blocks.2.\S+ would have the shape \S+, and it has no such tensor"),
    "context": (["--model.context", "1000000000000"], "wpe.weight would have the shape"),
    "vocab": (["--model.vocab", "1000000000000000"], "wte.weight would have the shape"),
    "overflow": (["--model.width", str(1 << 62)], "does not fit its tensors"),
    "no number of torch": (["--model.width", "111112"], "expected a number below 2"),  # 10**30: see the test
    "another family": (["--model.family", "llama"], "does not fit its tensors"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_not_those_of_the_tensors(path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    words, problem = SIZES[name]
    forged(path, config=to_toml(small(*words)).replace("111112", str(10**30)))
    assert re.search(problem, refused(path, capsys))


TYPES: list[tuple[str, Any, str]] = [
    ("config", 5, "Expected `str`, got `int` - at `$.config`"),
    ("config", "x = [" + "[" * 5000, "nested too deeply"),
    ("config", "[model]\nwidth" + ".a" * 3000 + " = 1", "nested too deeply"),
    ("config", "[model]\nwidth = 'x'", "model.width"),
    ("config", "\x1b[31m", "not valid TOML"),
    ("config", "x = " + "9" * 5000, "not valid TOML"),
    ("config", "[log]\nx" + "9" * 5000 + " = 1", "999 ..."),
    ("step", "1", "Expected `int`, got `str` - at `$.step`"),
    ("step", -1, "Expected `int` >= 0 - at `$.step`"),
    ("step", 10**30, "$.step"),
    ("step", None, "$.step"),
    ("num_ranks", 0, "$.num_ranks"),
    ("data", [], "$.data"),
    ("data", {"fingerprint": "x", "next_sample": 0.5}, "$.data.next_sample"),
    ("health", {"left_out": [[0, 1 << 60]]}, "$.health.left_out"),
    ("health", {"left_out": [[0, 1]] * 70_000}, "$.health.left_out"),
    ("stepper", {"scaler": {"scale": 0, "good_steps": 0, "skipped_steps": 0}}, "$.stepper.scaler.scale"),
]


@pytest.mark.parametrize(("key", "value", "problem"), TYPES)
def test_meta_of_other_types(
    path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, problem: str
) -> None:
    forged(path, **{key: value})
    assert problem in refused(path, capsys)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device; expected a regular file"),
    "a pipe": (pipe, "is a pipe; expected a regular file"),
    "a folder": (lambda path: path.mkdir(), "is a folder; expected a regular file"),
    "a terabyte": (sparse, "expected at most"),
    "nothing": (lambda path: None, "cannot be read: No such file"),
    "deep": (lambda path: path.write_bytes(b'{"version":' + b"[" * 100_000), "is no tokenizer.json"),
    "no tokenizer": (lambda path: path.write_bytes(b"\xff\n\x1b[31m"), "is no tokenizer.json"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_no_tokenizer(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    pytest.importorskip("tokenizers")
    make, problem = TOKENIZERS[name]
    make(tmp_path / "t.json")
    forged(path, config=to_toml(small("--data.tokenizer", str(tmp_path / "t.json"))))
    assert problem in refused(path, capsys)
    assert problem in refused(path, capsys, "--tokenizer", str(tmp_path / "t.json"))


def test_a_tensor_of_another_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small()
    tensors = {f"model/{name}": value.numpy() for name, value in build(config.model.resolve()).state_dict().items()}
    tensors["model/ln_f.weight"] = np.ones(17, np.float32)
    ckpt.save(tmp_path / "a", tensors, comm=None, meta=meta_of(config))
    assert "ln_f.weight would have the shape (16,), and it has (17,)" in refused(tmp_path / "a", capsys)
    assert torch.ones(1).device.type == "cpu"  # the check leaves no default device behind
