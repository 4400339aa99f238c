"""Generates text: with the model in training, or with a checkpoint in one process without MPI."""

import codecs
from collections.abc import Callable, Iterator

import torch

import ckpt
from mpitrain.config import from_text
from mpitrain.models import build, sample_tokens
from mpitrain.train.saving import read_meta
from mpitrain.weights import state


def sample(path: str, prompt: str, *, num: int, temperature: float, seed: int) -> Iterator[str]:
    """The prompt and the text that the model generates after it, piece by piece.

    `path`: a checkpoint, or a run's folder: its newest checkpoint. `num`: number of bytes to draw.
    ValueError if there is no checkpoint, if it is damaged or not of the main job, or if an argument is out of range.
    """
    if not prompt or num < 0:
        raise ValueError(f"expected a prompt and a number of bytes of at least 0, got {prompt!r} and {num}")
    folder = ckpt.find(path)
    model = build(from_text(read_meta(folder)["config"], str(folder)).model.resolve())
    state.load(folder, model)
    yield from write(
        model,
        prompt,
        num=num,
        context=model.config.context,
        temperature=temperature,
        seed=seed,
        device=torch.device("cpu"),
    )


def write(
    model: Callable[[torch.Tensor], torch.Tensor],
    prompt: str,
    *,
    num: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> Iterator[str]:
    """The prompt and the text of `num` bytes after it, piece by piece. `model`: as in `sample_tokens`, on `device`.

    Collective if the model is spread over ranks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    yield prompt
    drawn = sample_tokens(
        model,
        torch.tensor(list(prompt.encode()), device=device),
        num=num,
        context=context,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    for token in drawn:
        yield decoder.decode(bytes([token % 256]))
    yield decoder.decode(b"", final=True)
