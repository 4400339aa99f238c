"""Activation checkpointing: the activations of a block are not kept for the backward, which computes them again.

A checkpointed block keeps its class, parts and names. It gets an attribute `forward` that calls the `forward` of its class.
`fully_shard` works around both, so the order of the two functions makes no difference: when the block's gradient comes, its full
parameters are filled, and the second computation uses them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from collectives import Communicator
from mpitrain.placement.parts import ranks_with_input, stages_of
from mpitrain.sharding.setup.blocks import stacked_blocks
from mpitrain.sharding.unit.parameter import forward_of, replace_forward
from mpitrain.sharding.unit.unit import kind_of


def checkpoint_activations(
    model: nn.Module,
    blocks: Iterable[nn.Module] | None = None,
    *,
    what: Literal["block", "attention"] = "block",
    partition: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Let blocks of a model keep only their inputs, and compute their activations again in the backward; returns the model.

    The second computation takes one more forward of the blocks, up to a third of a step's time. Memory has the activations of only one
    block at a time (Chen et al. 2016, "Training deep nets with sublinear memory cost"). torch's non-reentrant checkpoint gives
    gradients with the same bits, also with dropout by torch's generators. The call may come before or after `fully_shard`, and keeps
    the names of parameters. Side effects of a block's forward happen twice, such as BatchNorm's in training without slices. Caches of
    keys and values must be off (`use_cache=False` in transformers).

    Args:
        model: changed in place.
        blocks: parts of the model; None: the blocks of its stacks, as `fully_shard` finds them, and after `pipeline` the blocks of
            this rank's stages, of which there may be none.
        what: "attention" computes only the attention of each block again: the outermost modules in it whose class name ends with
            "Attention", projections included. torch's fused attention itself keeps little. Korthikanti et al. 2022 (2205.05198) choose
            the attention for its large activations that take little time.
        partition: of an input that is the same on all ranks that `tensor_parallel` has cut the model over, each rank keeps 1/N, and the
            backward gathers it (ZeRO-R's P_a; Rajbhandari et al. 2020, 1910.02054). Other inputs stay as they are: with sequence
            parallelism a block's input is this rank's own tokens. The call comes after `tensor_parallel`, or before it.
        offload: inputs on a GPU are kept in pinned memory of the host, and come back in the backward (P_a+cpu). On CPUs this changes
            nothing.

    Raises:
        ValueError: no blocks, a block that is not in the model, that is checkpointed already, or has no attention; or another `what`.
    """
    if what not in ("block", "attention"):
        raise ValueError(f"checkpoint_activations: expected what='block' or 'attention', got {what!r}")
    chosen = stacked_blocks(model, in_stages=True) if blocks is None else list(blocks)
    if not chosen and stages_of(model.parameters()) is None:
        raise ValueError(
            f"checkpoint_activations: this {type(model).__name__} has no stack of blocks; pass the parts to checkpoint as blocks=..."
        )
    parts = {id(part) for part in model.modules()}
    for block in chosen:
        if id(block) not in parts:
            raise ValueError(f"checkpoint_activations: this {type(block).__name__} is not part of the model")
    if what == "attention":
        chosen = [part for block in chosen for part in _attention_of(block)]
    for block in chosen:
        forward = forward_of(block)
        if isinstance(forward, partial) and forward.func is _checkpointed:
            raise ValueError(f"checkpoint_activations: this {type(block).__name__} is checkpointed already")
    for block in chosen:
        # Not a closure: a copy of the block must run the copy's forward.
        replace_forward(block, partial(_checkpointed, block, forward_of(block), partition, offload))
    return model


def _attention_of(block: nn.Module) -> list[nn.Module]:
    def find(module: nn.Module) -> Iterator[nn.Module]:
        if kind_of(module).__name__.endswith("Attention"):
            yield module
        else:
            for child in module.children():
                yield from find(child)

    found = list(find(block))
    if not found:
        raise ValueError(
            f"checkpoint_activations: this {type(block).__name__} has no module whose class name ends with Attention; pass the modules "
            "to checkpoint as blocks=..., with what='block'"
        )
    return found


def _checkpointed(
    block: nn.Module, forward: Callable[..., Any], partition: bool, offload: bool, /, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with _keeping(ranks_with_input(block) if partition else None, offload, (*args, *kwargs.values())):
        # By position: torch's function has its own keywords, and protects only positional arguments against in-place changes.
        return checkpoint(_run, forward, tuple(kwargs), *args, *kwargs.values(), use_reentrant=False)


def _run(forward: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    count = len(values) - len(names)
    return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))


# How inputs are kept


def _keeping(comm: Communicator | None, offload: bool, inputs: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Let the checkpoint made in the block keep its inputs in another way. `comm`: all its ranks have the same stream.

    The stream is the first floating-point tensor. Within the checkpoint torch's own hooks are on top of these.
    """
    stream = next((x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    offload = offload and stream is not None and stream.is_cuda
    if stream is None or (comm is None and not offload):
        return nullcontext()
    mark = _mark(stream)

    def pack(x: torch.Tensor) -> _Kept:
        cut = _Cut.of(x, comm) if comm is not None and _mark(x) == mark else None
        value = x if cut is None else cut.own(x)
        return _Kept(_on_host(value) if offload and x.is_cuda else value, x.device, cut)

    return saved_tensors_hooks(pack, _Kept.unpack)


def _mark(x: torch.Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others. torch keeps `pack`, which must not keep the tensor."""
    return (
        x.untyped_storage()._cdata,
        x.storage_offset(),
        x.shape,
        x.stride(),
        x.dtype,
    )  # also of a tensor without memory


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


class _Cut(NamedTuple):
    """How a tensor that is the same on all ranks of `comm` is cut over them."""

    comm: Communicator
    shape: tuple[int, ...]  # with the dimensions from the longest stride to the shortest
    order: tuple[
        int, ...
    ]  # of the dimensions. The gathered tensor has the strides of the first one: last digits depend on them

    @classmethod
    def of(cls, x: torch.Tensor, comm: Communicator) -> "_Cut":
        order = tuple(sorted(range(x.ndim), key=x.stride, reverse=True))
        return cls(comm, tuple(x.shape[dim] for dim in order), order)

    @property
    def edges(self) -> list[int]:
        """Where each rank's elements begin, and the end."""
        return [prod(self.shape) * rank // self.comm.size for rank in range(self.comm.size + 1)]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """(n,): a copy of this rank's elements."""
        begin, end = self.edges[self.comm.rank : self.comm.rank + 2]
        return x.detach().permute(self.order).reshape(-1)[begin:end].clone()

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """The tensor of which each rank has its own elements. Collective."""
        out = own.new_empty(self.edges[-1])
        self.comm.all_gather(out, own, counts=[end - begin for begin, end in pairwise(self.edges)])
        return out.view(self.shape).permute([self.order.index(dim) for dim in range(len(self.order))])


class _Kept(NamedTuple):
    """What is kept of an input of `device`: its value, or this rank's elements of it, perhaps on the host."""

    value: torch.Tensor
    device: torch.device
    cut: _Cut | None

    def unpack(self) -> torch.Tensor:
        """The input."""
        value = self.value.to(self.device, non_blocking=True)
        return value if self.cut is None else self.cut.whole(value)
