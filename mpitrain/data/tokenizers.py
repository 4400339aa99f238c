"""Tokenizers: bytes, and the files tokenizer.json of Hugging Face's library `tokenizers`."""

import hashlib
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from mpitrain.config import ConfigError, DataConfig

BYTES = "bytes"
"""The setting `data.tokenizer` for tokens that are bytes."""

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    name: str
    """A short name, and what tells it from others: a checkpoint keeps it."""
    num_tokens: int
    """Tokens are at least 0 and below this number."""

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text in UTF-8: int32."""

    def document(self, text: bytes) -> np.ndarray:
        """The tokens of a document: those of its text, and the separator."""

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of tokens, in UTF-8 as far as they end with a character."""


class Bytes:
    """Tokens are bytes. The separator is the byte 0, which text does not contain."""

    name = BYTES
    num_tokens = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def document(self, text: bytes) -> np.ndarray:
        tokens = np.empty(len(text) + 1, np.int32)
        tokens[:-1] = np.frombuffer(text, np.uint8)
        tokens[-1] = 0
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        return (np.asarray(tokens) % 256).astype(np.uint8).tobytes()


class JsonTokenizer:
    """A tokenizer.json. `separator`: a token of its vocabulary; None: one of those that usually end a text.

    ImportError without the library, ConfigError if the file is no tokenizer, or has no such token.
    """

    def __init__(self, path: str | os.PathLike[str], separator: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ImportError('data.tokenizer: a tokenizer.json needs pip install "mpitrain[tokenizers]"') from None
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"data.tokenizer: {path} cannot be read: {error.strerror or error}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises its base class
            raise ConfigError(f"data.tokenizer: {path} is no tokenizer.json: {error}") from None
        self.name = f"{Path(path).name} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
        self.num_tokens = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        names = [separator] if separator is not None else list(_SEPARATORS)
        found = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            wanted = (
                f"the token {separator!r}" if separator is not None else f"one of the tokens {', '.join(_SEPARATORS)}"
            )
            raise ConfigError(f"data.separator: expected {wanted} in {path}; name the token that ends a document")
        self._separator = found[0]

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids, np.int32)

    def document(self, text: bytes) -> np.ndarray:
        return np.append(self.encode(text), np.int32(self._separator))

    def decode(self, tokens: np.ndarray) -> bytes:
        text: str = self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text.encode()


def load_tokenizer(config: DataConfig, *, vocab: int) -> Tokenizer | None:
    """The tokenizer of a run; None for files of tokens without one. `vocab`: tokens of the model.

    ConfigError if it cannot be read, or has more tokens than the model. ImportError without the library that it needs.
    """
    if config.tokenizer == BYTES:
        return None if config.has_tokens else Bytes()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the ranks are parallel
    made = JsonTokenizer(config.tokenizer, config.separator)
    if made.num_tokens > vocab:
        raise ConfigError(
            f"model.vocab: {config.tokenizer} has {made.num_tokens} tokens, and the model has {vocab}: take --model.vocab "
            f"{made.num_tokens}, or a greater one"
        )
    return made
