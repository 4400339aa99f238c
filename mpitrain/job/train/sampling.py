"""Generates text: with the model in training, or with a checkpoint in one process without MPI."""

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

import ckpt
from ckpt.storage.local import in_a_line
from ckpt.storage.places import Place
from mpitrain.job.config import from_text, unpacked_settings
from mpitrain.job.data.tokenizers import Tokenizer, load_tokenizer
from mpitrain.job.train import stop
from mpitrain.job.train.checkpoints.meta import read_meta
from mpitrain.models import TransformerConfig, build, sample_tokens
from mpitrain.weights import state

_NO_CHARACTER = "\ufffd".encode()
_TOLD_EVERY_S = 10.0


def sample(
    path: str, prompt: str, *, num: int, temperature: float, seed: int, tokenizer_file: str | None = None
) -> Iterator[str]:
    """The prompt and the text that the model generates after it, piece by piece.

    `path`: a checkpoint, or a run's folder: its newest checkpoint. `num`: number of tokens to draw, such as bytes.
    `tokenizer_file`: the run's tokenizer.json, if it is at another place now.
    ValueError if there is no checkpoint, if it is damaged or not of the main job, or if an argument is out of range.
    """
    if not prompt or num < 0:
        raise ValueError(f"expected a prompt and a number of bytes of at least 0, got {prompt!r} and {num}")
    folder = ckpt.find(path)
    config = from_text(unpacked_settings(read_meta(folder)["config"]), str(folder))
    sizes = config.model.resolve()
    _check_fit(folder, sizes)
    data = config.data if tokenizer_file is None else replace(config.data, tokenizer=tokenizer_file)
    tokenizer = load_tokenizer(data, vocab=sizes.vocab)
    if tokenizer is None:
        raise ValueError(
            f"{folder}: the tokenizer of this run's files of tokens is not known; expected data.tokenizer in its settings"
        )
    model = build(sizes)
    state.load(folder, model)
    yield from write(
        tokenizer,
        model,
        prompt,
        num=num,
        context=model.config.context,
        temperature=temperature,
        seed=seed,
        device=torch.device("cpu"),
    )


def _check_fit(folder: Place, sizes: TransformerConfig) -> None:
    """CheckpointError unless the tensors of the checkpoint are those of a model of these sizes: a stranger's config may say anything.

    Nothing of the model's size is allocated.
    """
    there = {name: entry.shape for name, entry in ckpt.open(folder).items() if name.startswith("model/")}
    problem = f"{folder}: the config in its meta does not fit its tensors"
    if sizes.layers > len(there):
        raise ckpt.CheckpointError(f"{problem}: {sizes.layers} layers, and {len(there)} tensors of the model")
    try:
        with torch.device("meta"):
            model = build(sizes)
    except (RuntimeError, TypeError, OverflowError) as error:  # more elements than torch has numbers for
        raise ckpt.CheckpointError(f"{problem}: {in_a_line(error)}") from None
    for name, param in model.named_parameters():
        if (shape := there.get(f"model/{name}")) != param.shape:
            has = "it has no such tensor" if shape is None else f"it has {shape}"
            raise ckpt.CheckpointError(f"{problem}: {name} would have the shape {tuple(param.shape)}, and {has}")


def write(
    tokenizer: Tokenizer,
    model: Callable[[torch.Tensor], torch.Tensor],
    prompt: str,
    *,
    num: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> Iterator[str]:
    """The prompt, the text that each of `num` tokens adds, which may be "", and the rest. `model`: as in `sample_tokens`, on `device`.

    Collective if the model is spread over ranks.
    """
    yield prompt
    begin = tokenizer.encode(prompt.encode())
    drawn = sample_tokens(
        model,
        torch.tensor(begin, dtype=torch.int64, device=device),
        num=num,
        context=context,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    # Tokens may be parts of characters, and a space may belong to the next token: the text of all so far is what counts.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    tokens, text = [], b""
    for token in drawn:
        tokens.append(token)
        so_far = tokenizer.decode(np.array(tokens))
        is_whole = so_far.startswith(text) and not so_far.endswith(_NO_CHARACTER)
        yield decoder.decode(so_far[len(text) :]) if is_whole else ""
        text = so_far if is_whole else text
    yield decoder.decode(tokenizer.decode(np.array(tokens))[len(text) :] if tokens else b"", final=True)


def written(
    pieces: Iterator[str],
    *,
    num: int,
    limit_s: float,
    sum_of_ranks: Callable[..., list[float]],
    rank: int,
    say: Callable[[str], object],
) -> str:
    """The text of the pieces of `write`, at most until a rank is asked to stop or `limit_s` seconds have passed on rank 0. Collective.

    `num`: the tokens that are asked for. `sum_of_ranks`: of each argument. `say`: prints a line, every ten seconds and at an early end.
    """
    began = told = time.monotonic()
    text = []
    for number, piece in enumerate(pieces):  # number 0 is the prompt
        text.append(piece)
        now = time.monotonic()
        asked, late = sum_of_ranks(stop.requested(), rank == 0 and now - began > limit_s)
        if (asked or late) and number < num:
            why = "as asked" if asked else f"{limit_s:g} s are over; --train.sample-bytes {num} sets no limit of time"
            say(f"the sample ends after {number} of {num} bytes: {why}")
            break
        if now - told > _TOLD_EVERY_S:
            told = now
            say(f"{number} of {num} bytes")
    return "".join(text)
