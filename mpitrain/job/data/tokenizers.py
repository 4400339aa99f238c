"""Tokenizers: bytes, and the files tokenizer.json of Hugging Face's library `tokenizers`."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ckpt.storage.local import in_a_line
from ckpt.storage.local_path import read_given
from mpitrain.job.config import ConfigError, DataConfig
from mpitrain.job.data.engines import Encode, choose, encode_by

if TYPE_CHECKING:
    from ckpt.ranks import Ranks

BYTES = "bytes"
"""The setting `data.tokenizer` for tokens that are bytes."""

_MAX_BYTES = 256 << 20
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    name: str
    """A short name, and what tells it from others: a checkpoint keeps it."""
    num_tokens: int
    """Tokens are at least 0 and below this number."""
    separator: int
    """The token that ends a document."""

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text in UTF-8: int32."""

    def document(self, text: bytes) -> np.ndarray:
        """The tokens of a document: those of its text, and the separator."""

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of tokens, in UTF-8 as far as they end with a character."""

    def num_bytes(self, tokens: np.ndarray) -> int:
        """The bytes of the text of tokens. A separator counts as one byte, for all tokenizers."""


class Bytes:
    """Tokens are bytes. The separator is the byte 0, which text does not contain."""

    name = BYTES
    num_tokens = 256
    separator = 0

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def document(self, text: bytes) -> np.ndarray:
        tokens = np.empty(len(text) + 1, np.int32)
        tokens[:-1] = np.frombuffer(text, np.uint8)
        tokens[-1] = 0
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        return (np.asarray(tokens) % 256).astype(np.uint8).tobytes()

    def num_bytes(self, tokens: np.ndarray) -> int:
        return len(tokens)


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
            data = read_given(Path(path).expanduser(), _MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"data.tokenizer: {path} cannot be read: {error.strerror or error}") from None
        except (ValueError, RuntimeError) as error:  # no regular file, or no home for "~"
            raise ConfigError(f"data.tokenizer: {error}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception, or what its Rust makes of a panic
            raise ConfigError(f"data.tokenizer: {path} is no tokenizer.json: {in_a_line(error)}") from None
        self._tokenizer.no_truncation()  # files of models for short texts ask for it, and for padding
        self._tokenizer.no_padding()
        self.name = f"{Path(path).name} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
        self.num_tokens = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        names = [separator] if separator is not None else list(_SEPARATORS)
        found = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            wanted = (
                f"the token {separator!r}" if separator is not None else f"one of the tokens {', '.join(_SEPARATORS)}"
            )
            raise ConfigError(f"data.separator: expected {wanted} in {path}; name the token that ends a document")
        self.separator = found[0]
        self._made_of = path, separator
        self._encode: Encode = self._encode_slowly
        self._engine: str | None = None

    def use_fast_engine(self, comm: "Ranks", texts: Callable[[], Iterable[bytes]]) -> list[str]:
        """Encode with a faster engine, if one gives the same tokens: see `engines.choose`. Collective. Returns lines for the user."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        choice = choose(self._tokenizer.to_str(), self._encode_slowly, [token.content for token in added], comm, texts)
        self._encode, self._engine = choice.encode, choice.engine
        return choice.lines

    def take_engine(self, engine: str) -> None:
        """Encode with the engine that this rank has chosen in another process."""
        self._encode, self._engine = encode_by(engine, self._tokenizer.to_str(), self._encode_slowly), engine

    def __reduce__(self) -> tuple[object, ...]:
        return _same, (*self._made_of, self.name, self._engine)

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(text)

    def document(self, text: bytes) -> np.ndarray:
        return np.append(self.encode(text), np.int32(self.separator))

    def decode(self, tokens: np.ndarray) -> bytes:
        text: str = self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text.encode()

    def num_bytes(self, tokens: np.ndarray) -> int:
        words = tokens[tokens != self.separator]
        text: str = self._tokenizer.decode(words.tolist(), skip_special_tokens=False)
        whole = text.strip("\ufffd")  # a character that the ends of a row cut, byte by byte
        return len(whole.encode()) + len(text) - len(whole) + len(tokens) - len(words)

    def _encode_slowly(self, text: bytes) -> np.ndarray:
        (found,) = self._tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)  # it finds no offsets
        return np.array(found.ids, np.int32)


def _same(path: str | os.PathLike[str], separator: str | None, name: str, engine: str | None) -> JsonTokenizer:
    """The tokenizer again, in another process. ConfigError if the file is another one by now."""
    made = JsonTokenizer(path, separator)
    if made.name != name:
        raise ConfigError(f"data.tokenizer: {path} has changed while the run began: expected {name}, got {made.name}")
    if engine is not None:
        made.take_engine(engine)
    return made


def load_tokenizer(config: DataConfig, *, vocab: int | None) -> Tokenizer | None:
    """The tokenizer of a run; None for files of tokens without one. `vocab`: tokens of the model; None without a model.

    ConfigError if it cannot be read, or has more tokens than the model. ImportError without the library that it needs.
    """
    if config.tokenizer == BYTES:
        return None if config.has_tokens else Bytes()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the ranks are parallel
    made = JsonTokenizer(config.tokenizer, config.separator)
    if vocab is not None and made.num_tokens > vocab:
        raise ConfigError(
            f"model.vocab: {config.tokenizer} has {made.num_tokens} tokens, and the model has {vocab}: take --model.vocab "
            f"{made.num_tokens}, or a greater one"
        )
    return made
