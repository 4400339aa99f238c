"""`python -m mpitrain tokenize` and `python -m mpitrain tokenizer train`: see USAGE and TRAIN_USAGE."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from collectives import Communicator
from collectives.shared.terminal import positive
from mpitrain.job.config import Config, ConfigError, parse

USAGE = """usage: mpirun -np N python -m mpitrain tokenize --data.path SHARDS --data.tokenizer FILE --out DIR [settings]

Writes the tokens of documents into files for --data.path: Megatron-LM's .bin with .idx. All ranks work. If a job ends early, the same
command goes on. The files are the same at any number of ranks.

  --out DIR   an empty or new folder, or that of an earlier job with the same settings

Of the settings, those of the data count: what to read, and the tokenizer (docs/data.md).
"""
TRAIN_USAGE = """usage: python -m mpitrain tokenizer train [--data.path SHARDS] [--vocab-size N] [--out FILE] [--bytes N] [settings]

Makes a tokenizer.json for data.tokenizer: a byte-level BPE, with the separator <|endoftext|>. One process reads the documents.

  --vocab-size N   number of tokens (default: 32000)
  --out FILE       a new file (default: tokenizer.json)
  --bytes N        bytes of text to read, from parts of all shards (default: 1000000000)

Of the settings, those of the data count: what to read (docs/data.md).
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def main(words: Sequence[str], comm: Communicator) -> None:
    """`tokenize`. Collective. Errors are raised on all ranks."""
    parser = _parser("tokenize")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True)
    with comm.together():
        options, config = _parse(parser, words, USAGE)
    from mpitrain.job.data.tokenize.job import tokenize

    result = tokenize(config.data, options.out, comm)
    if comm.rank == 0:
        whole, text_mb = result.whole, result.own.text_bytes / 1e6
        own = f"; {text_mb:,.1f} MB of text in {result.seconds:.1f} s, {text_mb / result.seconds:,.1f} MB/s" * (
            text_mb > 0
        )
        damaged = f", {whole.damaged} damaged ones left out" * (whole.damaged > 0)
        print(
            f"{whole.documents:,} documents{damaged}, {whole.tokens:,} tokens ({result.dtype}) in {result.num_files} files, "
            f"{whole.text_bytes / whole.tokens:.2f} bytes a token{own}\n"
            f"train on them: --data.path {shlex.quote(f'{options.out}/*.bin')} --data.tokenizer {config.data.tokenizer} "
            f"--model.vocab {result.num_tokens}",
            flush=True,
        )


def train_tokenizer(words: Sequence[str]) -> None:
    """`tokenizer train`, in one process. ConfigError, ValueError or OSError if it fails."""
    if words[:1] != ["train"] and not _asks_for_help(words):
        raise ConfigError(f"tokenizer: expected train, got {words[0] if words else 'nothing'}")
    parser = _parser("tokenizer train")
    parser.add_argument("--vocab-size", type=positive, default=32000)
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("tokenizer.json"))
    parser.add_argument("--bytes", type=positive, default=10**9)
    options, config = _parse(parser, words if _asks_for_help(words) else words[1:], TRAIN_USAGE)
    from mpitrain.job.data.tokenize.training import train

    console = Console(highlight=False, soft_wrap=True)
    made = train(
        config.data, options.out, num_tokens=options.vocab_size, most_bytes=options.bytes, seed=config.train.seed,
        say=lambda line: console.print(line, markup=False),
    )  # fmt: skip
    console.print(
        f"{options.out}: {made.num_tokens:,} tokens; use it with --data.tokenizer {options.out} --model.vocab {made.num_tokens}",
        markup=False,
    )


def _parser(name: str) -> _Parser:
    return _Parser(prog=name, add_help=False, allow_abbrev=False)


def _parse(parser: _Parser, words: Sequence[str], usage: str) -> tuple[argparse.Namespace, Config]:
    """The options of a command, and the settings that are the other words."""
    if _asks_for_help(words):
        print(usage)
        parse(words)  # prints all settings and exits
    options, others = parser.parse_known_args(list(words))
    return options, parse(others)


def _asks_for_help(words: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(words))
