"""Forward hooks: how a stream of activations enters and leaves the regions, blocks and other modules of a cut model."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mpitrain.placement.parts import part_of
from mpitrain.tensor import regions
from mpitrain.tensor.layers import TensorRanks
from mpitrain.torch_glue.torch_internals import in_backward


def enter_region(
    ranks: TensorRanks, is_cut: bool, enters_all: bool, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """A forward pre-hook: the first floating-point tensor is the stream; states of an encoder are whole on all ranks.

    `enters_all`: all tensors are the same on all ranks, or if `is_cut` those with as many rows as the stream are this rank's tokens.
    """
    stream: torch.Tensor | None = None

    def entered(name: str, value: Any) -> Any:
        nonlocal stream
        if not isinstance(value, torch.Tensor):
            return value
        if stream is None and value.is_floating_point():
            stream = value
            return ranks.enter(value, is_cut=is_cut)
        if enters_all and stream is not None:
            has_tokens = value.ndim > 1 and value.shape[:-1] == stream.shape[:-1]
            return ranks.enter_also(value, is_cut=is_cut and has_tokens)
        return regions.copy(value, ranks.exchange) if value.requires_grad and name in _OTHER_STREAMS else value

    args = tuple(entered("", value) for value in args)
    return args, {name: entered(name, value) for name, value in kwargs.items()}


_OTHER_STREAMS = ("key_value_states", "encoder_hidden_states")
"""Arguments by which a transformers model passes the states of its encoder into a region. Other tensors are this rank's own."""


def leave_region(ranks: TensorRanks, is_cut: bool, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of a region whose output is a part of the sum over the ranks."""
    return _with_first(output, partial(ranks.leave, is_cut=is_cut))


def check_once(region: nn.Module, name: str, *, is_cut: bool) -> None:
    """Check the first output of a region that has a gradient; see `_check_paths`."""
    region.register_forward_hook(_FirstCheck(name, is_cut))


class _FirstCheck:
    """A forward hook that removes itself, from a copy of the region, too."""

    def __init__(self, name: str, is_cut: bool) -> None:
        self._name, self._is_cut = name, is_cut

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.grad_fn is not None:
            key = next(key for key, hook in module._forward_hooks.items() if hook is self)
            del module._forward_hooks[key]
            _check_paths(first.grad_fn, self._name, is_cut=self._is_cut)


_ENTRIES, _SUMS = (
    ("_CopyBackward", "_GatherTokensBackward"),
    ("_AddBackward", "_ScatterTokensBackward", "_RowProductBackward"),
)
"""Nodes of the graph of autograd: where a stream enters a region, and where the sum over ranks is."""


def _check_paths(output: Any, name: str, *, is_cut: bool) -> None:
    """ValueError if the output of a region depends on its input, or on an uncut parameter, without the sum over ranks in between.

    Within the region the gradient of each is a part of a sum, so the gradient on such a path would count N times. It does not for
    a parameter if after the sum each rank has its own tokens, `is_cut`.
    """
    nodes, seen = [output], {output}
    while nodes:
        node = nodes.pop()
        kind, param = type(node).__name__, getattr(node, "variable", None)
        if kind in _SUMS:
            continue
        part = None if param is None or is_cut else part_of(param)
        if kind in _ENTRIES or (part is not None and part.is_partial and not part.is_cut):
            what = "its input" if param is None else f"a parameter of shape {tuple(param.shape)}"
            raise ValueError(
                f"tensor_parallel: {name or 'the model'} uses {what} after its sum over ranks, or without it, as a residual "
                "connection does; do this in a module around it"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def enter_whole(ranks: TensorRanks, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook of a module that gets all tokens of a stream whose tokens are cut."""
    return _with_stream(args, kwargs, ranks.widen)


def leave_whole(ranks: TensorRanks, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of a module that gets all tokens of a stream whose tokens are cut."""
    return _with_first(output, ranks.narrow)


def split_stream(
    ranks: TensorRanks, blocks: Sequence[str], is_library: bool, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """A forward pre-hook of the first of a stack's blocks. `is_library`: a block of transformers, which must have one stream alone."""
    split = partial(_split_alone, ranks, module, args, kwargs) if is_library else ranks.split
    args, kwargs = _with_stream(args, kwargs, split)
    if not in_backward():  # activation checkpointing may repeat this block alone, which is no begin of the stack
        ranks.stack = blocks
    return args, kwargs


def check_split(ranks: TensorRanks, blocks: Sequence[str], name: str, module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a stack's other blocks. ValueError if the first one was left out, so the stream is not split."""
    if ranks.stack is not blocks and not in_backward():  # activation checkpointing may repeat one block alone
        raise ValueError(_not_split(blocks, f"calls {name} without it"))


def _not_split(blocks: Sequence[str], does: str) -> str:
    return (
        f"sequence parallelism splits the tokens before {blocks[0]}, but the model {does}, as layer dropout does; call it always, or "
        "pass sequence=False to tensor_parallel"
    )


def arrive(ranks: TensorRanks, blocks: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """The stream before a block, from another stage; see `SplitStream`."""
    ranks.stack = blocks
    return ranks.take_own(x) if torch.is_grad_enabled() else ranks.split(x)


def pass_on(ranks: TensorRanks, blocks: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """The stream after a block, for another stage. ValueError if the first block of the stack was left out."""
    if ranks.stack is not blocks:
        raise ValueError(_not_split(blocks, "leaves it out"))
    ranks.stack = None
    return x if torch.is_grad_enabled() else ranks.join(x)


def check_joined(ranks: TensorRanks, blocks: Sequence[str], module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of the module around a stack. ValueError if the last block was left out, so the stream is still split."""
    if ranks.stack is blocks and not in_backward():
        ranks.stack = None
        raise ValueError(
            f"sequence parallelism joins the tokens after {blocks[-1]}, but the model calls {blocks[0]} without it, as layer "
            "dropout does; call it always, or pass sequence=False to tensor_parallel"
        )


def _split_alone(ranks: TensorRanks, module: nn.Module, args: Any, kwargs: Any, x: torch.Tensor) -> torch.Tensor:
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    for name, value in {**given, **given.get("kwargs", {})}.items():
        is_stream = isinstance(value, torch.Tensor) and value is not x and value.is_floating_point() and value.ndim > 2
        if is_stream and value.shape[:2] == x.shape[:2] and not any(key in name for key in _NOT_OF_TOKENS):
            raise ValueError(
                f"sequence parallelism needs one stream of activations between the blocks, and {type(module).__name__} has a second "
                f"one, {name} of shape {tuple(value.shape)}; pass sequence=False to tensor_parallel"
            )
    return ranks.split(x)


_NOT_OF_TOKENS = ("mask", "position", "rotary", "freqs", "encoder")
"""In the names of arguments by which all blocks get something for all tokens, which attention alone uses."""


def join_stream(ranks: TensorRanks, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of the last block of a stack."""
    ranks.stack = None
    return _with_first(output, ranks.join)


def once(ranks: TensorRanks, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of a module that all ranks compute alike, for a sum over the ranks."""
    return output / ranks.comm.size


def _with_stream(args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    """The arguments with another stream, which is the first floating-point tensor."""
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return (*args[:at], change(value), *args[at + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return args, {**kwargs, name: change(value)}
    return args, kwargs


def _with_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output with another stream, which is the first tensor."""
    if isinstance(output, torch.Tensor):
        return change(output)
    return type(output)([change(output[0]), *output[1:]])


def gather_output(
    ranks: TensorRanks, length: int, is_partial: bool, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """A forward hook: all `length` features of the output. `is_partial`: the ranks' gradients are parts of a sum, as in a region."""
    return regions.gather_features(output, ranks.exchange, length, is_partial=is_partial)


def gather_logits(ranks: TensorRanks, length: int, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of a head: all `length` logits, or this rank's part if the model computes its loss from them."""
    return output if ranks.keeps_logits else regions.gather_features(output, ranks.exchange, length)
