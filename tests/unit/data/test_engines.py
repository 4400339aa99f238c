"""A faster engine is used if it gives the tokens of the reference, on all ranks. Most engines here are fakes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from thread_ranks import ThreadRanks, on_ranks
from tokenizer_files import byte_pairs

from ckpt.ranks import Solo
from mpitrain.job.data.engines import ENGINES, Encode, choose
from mpitrain.job.data.tokenizers import JsonTokenizer


def reference(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int32)


def equal(json: str) -> Encode:
    assert json == "{}"
    return lambda text: reference(text) + 0


def unequal(json: str) -> Encode:
    """Wrong for one script alone."""
    return lambda text: reference(text)[:: -1 if "Съ".encode() in text else 1]


def absent(json: str) -> Encode:
    raise ImportError("no such library")


def panicking(json: str) -> Encode:
    class PanicException(BaseException):  # as Rust's panics are in Python
        pass

    raise PanicException("called `Option::unwrap()` on a `None` value\nmore lines")


def with_limits(json: str) -> Encode:
    def encode(text: bytes) -> np.ndarray:
        if len(text) > 10**6:
            raise RuntimeError("match limit exceeded")
        return reference(text)

    return encode


def chosen(
    comm: ThreadRanks, texts: Callable[[], list[bytes]] = list, **engines: Callable[[str], Encode]
) -> tuple[Encode, list[str]]:
    choice = choose("{}", reference, ["<s>"], comm, texts, engines)
    return choice.encode, choice.lines


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_engine_with_equal_tokens(size: int) -> None:
    engines = {"far": absent, "wrong": unequal, "broken": panicking, "right": equal, "late": equal}
    for encode, lines in on_ranks(size, lambda comm: chosen(comm, **engines)):
        assert encode is not reference and np.array_equal(encode(b"abc"), reference(b"abc"))
        assert lines == [
            "tokenizer: wrong is left out: its tokens differ from those of the library tokenizers in "
            "'Съешь же ещё этих мягких французских бул'",
            "tokenizer: broken is left out: it cannot use this tokenizer: called `Option::unwrap()` on a `None` value",
            "tokenizer: right encodes the documents",
        ]
    assert on_ranks(size, lambda comm: chosen(comm, far=absent)) == [(reference, [])] * size


def test_ranks_that_differ_take_the_same_engine() -> None:
    one_wrong = on_ranks(3, lambda comm: chosen(comm, engine=unequal if comm.rank == 1 else equal))
    assert all(encode is reference and "engine is left out: its tokens differ" in line for encode, (line,) in one_wrong)
    one_without = on_ranks(3, lambda comm: chosen(comm, engine=absent if comm.rank == 0 else equal))
    assert all(encode is reference and "2 of 3 ranks have it; expected all" in line for encode, (line,) in one_without)


def test_the_data_are_part_of_the_sample() -> None:
    def wrong_for_the_data(json: str) -> Encode:
        return lambda text: reference(text)[: 3 if b"all work and no play" in text else None]

    def damaged() -> list[bytes]:
        raise ValueError("a.tar is damaged")

    (_, lines), _ = on_ranks(2, lambda comm: chosen(comm, lambda: [b"all work and no play"], engine=wrong_for_the_data))
    assert "its tokens differ from those of the library tokenizers in 'all work and no play'" in lines[0]
    with pytest.raises(ValueError, match=r"a.tar is damaged"):
        on_ranks(2, lambda comm: chosen(comm, damaged, engine=equal))
    assert on_ranks(1, lambda comm: chosen(comm, damaged, engine=absent)) == [(reference, [])], (
        "they are not read in vain"
    )


def test_the_reference_encodes_what_an_engine_refuses() -> None:
    ((encode, _),) = on_ranks(1, lambda comm: chosen(comm, engine=with_limits))
    assert np.array_equal(encode(b"ab" * 10**6), reference(b"ab" * 10**6))


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_that_are_installed(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    file = byte_pairs(tmp_path / "tokenizer.json", [Path(__file__).read_text()] * 2, num_tokens=600)
    slow = JsonTokenizer(file)
    encode, lines, chosen = choose(
        file.read_text(), slow.encode, ["<|endoftext|>"], Solo(), engines={name: ENGINES[name]}
    )
    assert chosen == name
    assert lines == [f"tokenizer: {name} encodes the documents"]
    tokens = encode(Path(__file__).read_bytes())
    assert tokens.dtype == np.int32 and np.array_equal(tokens, slow.encode(Path(__file__).read_bytes()))
