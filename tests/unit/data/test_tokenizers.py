"""Tokenizers: text to tokens and back, and what a run refuses."""

from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import byte_pairs
from tokenizers import Tokenizer

from mpitrain.job.config import ConfigError, DataConfig
from mpitrain.job.data.tokenizers import Bytes, JsonTokenizer, load_tokenizer

TEXTS = ["all work and no play makes jack a dull boy", "Stra\u00dfe \u4e16\u754c \U0001f600"] * 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return byte_pairs(tmp_path / "tokenizer.json", TEXTS)


def test_bytes() -> None:
    text = TEXTS[1].encode()
    assert Bytes().document(text).tolist() == [*text, 0] and Bytes().document(text).dtype == np.int32
    assert Bytes().decode(Bytes().encode(text)) == text


def test_a_json_file(file: Path) -> None:
    made = load_tokenizer(DataConfig(tokenizer=str(file)), vocab=300)
    assert made is not None and made.num_tokens == 300 and made.name.startswith("tokenizer.json ")
    for text in TEXTS:
        tokens = made.document(text.encode())
        assert tokens.dtype == np.int32 and len(tokens) < len(text.encode()) + 1
        assert tokens[-1] == 0, "the separator is the first token here"
        assert made.decode(tokens[:-1]) == text.encode()
        assert np.array_equal(made.encode(text.encode()), tokens[:-1])
    other = byte_pairs(file.parent / "other.json", TEXTS[:1])
    assert JsonTokenizer(other).name != made.name


def test_a_json_file_that_asks_for_short_texts(file: Path) -> None:
    short = Tokenizer.from_file(str(file))
    short.enable_truncation(4)
    short.enable_padding(length=9)
    short.save(str(file))
    text = b"all work and no play" * 9
    assert JsonTokenizer(file).decode(JsonTokenizer(file).encode(text)) == text


def test_tokens_in_files_have_no_tokenizer_unless_it_is_named(file: Path) -> None:
    assert load_tokenizer(DataConfig(path=("a.npy",)), vocab=7) is None
    assert load_tokenizer(DataConfig(path=("a.npy",), tokenizer=str(file)), vocab=300) is not None
    assert isinstance(load_tokenizer(DataConfig(), vocab=256), Bytes)


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    unusual = byte_pairs(tmp_path / "unusual.json", TEXTS, separator="<stop>")
    assert JsonTokenizer(unusual, "<stop>").num_tokens == 300
    for words, vocab, text in (
        ({"tokenizer": "missing.json"}, 300, r"data.tokenizer: missing.json cannot be read: No such file"),
        ({"tokenizer": str(tmp_path / "no.json")}, 300, r"no.json is no tokenizer.json: "),
        (
            {"tokenizer": str(file)},
            299,
            r"has 300 tokens, and the model has 299: take --model.vocab 300, or a greater one",
        ),
        ({"tokenizer": str(file), "separator": "<stop>"}, 300, r"data.separator: expected the token '<stop>' in "),
        ({"tokenizer": str(unusual)}, 300, r"data.separator: expected one of the tokens <\|endoftext\|>, .* in "),
    ):
        with pytest.raises(ConfigError, match=text):
            load_tokenizer(DataConfig(**words), vocab=vocab)


def test_bytes_of_text_count_alike_for_all_tokenizers(tmp_path: Path, file: Path) -> None:
    """A separator is one byte, and so is each byte of a character that the begin of a row cuts."""
    documents = [text.encode() for text in TEXTS]
    length = sum(map(len, documents)) + len(documents)
    tokens = np.concatenate([JsonTokenizer(file).document(text) for text in documents])
    assert JsonTokenizer(file).num_bytes(tokens) == length
    of_bytes = JsonTokenizer(byte_pairs(tmp_path / "bytes.json", [], num_tokens=257))
    tokens = np.concatenate([of_bytes.document(text) for text in documents])
    assert [of_bytes.num_bytes(tokens[at:]) for at in range(length)] == list(range(length, 0, -1))
