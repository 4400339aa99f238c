"""Generates text, one token after the other. There is no cache: each token takes a forward of up to `context` tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


@torch.no_grad()
def sample_tokens(
    model: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    *,
    num: int,
    context: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is drawn.

    The CPU draws the tokens. So ranks with the same logits and generators draw the same tokens, and all ranks of a sharded model make
    the same calls.

    Args:
        model: from tokens (1, L) int64 to logits (1, L, V), or the last ones, (1, 1, V); a `LanguageModel`, sharded or not, or a
            function around it.
        prompt: (L,) int64, at least one token, on the model's device.
        num: number of tokens to draw.
        context: the context of the model; of a longer text the model sees only the last `context` tokens.
        temperature: divides the logits; 0 always takes the most probable token.
        generator: a CPU generator that makes the draws repeatable.

    Raises:
        ValueError: an empty prompt or a negative temperature.
    """
    if prompt.ndim != 1 or prompt.numel() == 0:
        raise ValueError(f"prompt: expected at least one token in one dimension, got shape {tuple(prompt.shape)}")
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    tokens = prompt[None, -context:]
    for _ in range(num):
        logits = model(tokens)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        yield token
        tokens = torch.cat([tokens, tokens.new_tensor([[token]])], dim=1)[:, -context:]


def generate(
    model: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    *,
    num: int,
    context: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """All tokens of `sample_tokens` at once: (num,) int64 on the CPU, without the prompt."""
    drawn = sample_tokens(model, prompt, num=num, context=context, temperature=temperature, generator=generator)
    return torch.tensor(list(drawn), dtype=torch.int64)
