"""Trains a byte-level BPE with Hugging Face's library `tokenizers`: GPT-2's rule for words, and all bytes as first tokens.

Source of the method: Sennrich et al., 2016 (arXiv:1508.07909); of the bytes and the rule: Radford et al., 2019, "Language Models are
Unsupervised Multitask Learners".
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from collectives import is_live_terminal
from mpitrain.job.config import ConfigError, DataConfig
from mpitrain.job.data.documents import DamagedSampleError, checked_text
from mpitrain.job.data.loading import say_what_stays, shard_cache
from mpitrain.job.data.order import keys_of, permute
from mpitrain.job.data.streaming.feed import Tolerance, tell
from mpitrain.job.data.tokenize.documents import cuts_of, find, pieces_of
from mpitrain.job.data.tokenize.progress import ShownProgress
from mpitrain.job.data.tokenizers import JsonTokenizer

SEPARATOR = "<|endoftext|>"
_LEAST_TOKENS = 257  # the bytes, and the separator
_PIECE_BYTES = 1 << 20  # of the shards, in another order: a part of the data is like all of them


def train(
    config: DataConfig, path: Path, *, num_tokens: int, most_bytes: int, seed: int, say: Callable[[str], object]
) -> JsonTokenizer:
    """Train a tokenizer on the first documents in an order of `seed`, and write its file. The same arguments make the same file.

    Args:
        config: what to read.
        path: of the file, which does not exist.
        num_tokens: at least 257. Pairs of tokens that come once become no token, so there may be fewer.
        most_bytes: of text to read.
        seed: chooses the documents.
        say: gets lines for the user.

    Raises:
        ConfigError: a number or path that is refused.
        ImportError: the library is missing.
        ValueError: the documents cannot be read, or more of them are damaged than `config.max_bad_samples`.
        OSError: a shard cannot be fetched, or the file cannot be written.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ImportError('tokenizer train: the library is missing: pip install "mpitrain[tokenizers]"') from None
    if num_tokens < _LEAST_TOKENS:
        raise ConfigError(f"tokenizer train: --vocab-size: expected at least {_LEAST_TOKENS}, got {num_tokens}")
    if path.exists():
        raise ConfigError(f"tokenizer train: {path} exists, and runs may need it; choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.touch()  # an error of the folder comes before the work
    try:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=num_tokens,
            min_frequency=2,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=is_live_terminal(),
        )
        tokenizer.train_from_iterator(_texts(config, most_bytes, seed, say), trainer)
        tokenizer.save(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return JsonTokenizer(path, SEPARATOR)


def _texts(config: DataConfig, most_bytes: int, seed: int, say: Callable[[str], object]) -> Iterator[str]:
    """The documents until they have so many bytes. ValueError if there is none."""
    origins = find(config)
    pieces = pieces_of(origins, _PIECE_BYTES)
    cache = shard_cache(config, [origin.shards for origin in origins])
    opened = [origin.opened(cache) for origin in origins]
    total = sum(piece.num_bytes for piece in pieces)
    num_shards = sum(len(origin.shards.names) for origin in origins)
    say(f"tokenizer train: {num_shards} shard{'s' * (num_shards > 1)}, {total / 1e6:,.1f} MB")
    shown = (
        None if is_live_terminal() else ShownProgress("tokenizer train: read", min(total, most_bytes))
    )  # else the library has a bar
    tolerance = Tolerance(config.max_bad_samples, tell)
    num_documents = num_bytes = num_damaged = 0
    started = time.monotonic()
    order = permute(np.arange(len(pieces)), len(pieces), keys_of(seed, "tokenizer")).tolist()
    documents = (
        (cut, index)
        for number in order
        for cut in cuts_of(pieces[number], opened[pieces[number].origin])
        for index in range(len(cut))
    )
    for cut, index in documents:
        try:
            text = checked_text(cut, index)
        except DamagedSampleError as error:
            num_damaged += 1
            tolerance.say(str(error))
            tolerance.check(num_damaged, str(error))
            continue
        num_documents += 1
        num_bytes += len(text)
        if shown is not None:
            shown.update(num_bytes)
        yield text.decode()
        if num_bytes >= most_bytes:
            break
    say_what_stays(config, [origin.shards for origin in origins], speaks=True)
    if not num_documents:
        raise ValueError("data: the shards have no documents; expected at least one")
    seconds = time.monotonic() - started
    say(
        f"tokenizer train: read {num_documents:,} documents, {num_bytes / 1e6:,.1f} MB, in {seconds:.1f} s; makes tokens of them"
    )
