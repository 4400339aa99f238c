"""The modules that compute with parts of matrices. `tensor_parallel` changes the class of a plain module to one of these."""

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from collectives import Communicator
from mpitrain.tensor import regions
from mpitrain.tensor.exchange import Exchange
from mpitrain.tensor.vocabulary import cross_entropy


class TensorRanks:
    """The ranks that hold a model together, and how its stream of activations enters and leaves a region.

    `sequence`: between the regions of a stack of blocks each rank has its own tokens. `cuts_tokens`: whether the stream that passes
    now is cut, which a forward without gradients can do without: see `split`.
    """

    def __init__(self, comm: Communicator, *, sequence: bool) -> None:
        self.comm, self.exchange = comm, Exchange(comm)
        self.sequence = self.cuts_tokens = sequence
        # The input of the region that runs now, if ranks may share it, and its version.
        self._entered: tuple[torch.Tensor, int] | None = None

    def enter(self, x: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The stream at the beginning of a region: all tokens. `is_cut`: in a stack whose tokens are cut, if any are."""
        if is_cut and self.cuts_tokens:
            whole = regions.gather_tokens(x, self.exchange, x.shape[-2] * self.comm.size)
            self._entered = whole, whole._version
            return whole
        return regions.copy(x, self.exchange)

    def leave(self, x: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The sum of the ranks' `x` at the end of a region."""
        self._check_input()
        if is_cut and self.cuts_tokens:
            return regions.scatter_tokens(x, self.exchange)
        return regions.add(x, self.exchange)

    def leave_with_product(self, x: torch.Tensor, weight: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The sum of the ranks' products `x @ weight.t()` at the end of a region."""
        if torch.is_autocast_enabled(x.device.type):  # it casts the operands of torch's own functions
            return self.leave(F.linear(x, weight), is_cut=is_cut)
        self._check_input()
        return regions.row_product(x, weight, self.exchange, cuts_tokens=is_cut and self.cuts_tokens)

    def _check_input(self) -> None:
        """ValueError if the region has written to its input. The other ranks compute with it, too."""
        entered, self._entered = self._entered, None
        if entered is not None and entered[0]._version != entered[1]:
            raise ValueError(
                "a module whose matrices are cut writes to its input in place, but the ranks of a node share this input; use "
                "operations that are not in place there, or pass sequence=False to tensor_parallel"
            )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, before the first block of a stack.

        If the tokens cannot be shared equally, a forward without gradients leaves them whole, and one with gradients is an error.
        """
        length, size = x.shape[-2], self.comm.size
        self.cuts_tokens = length % size == 0
        if self.cuts_tokens:
            return regions.own_tokens(x, self.exchange)
        if torch.is_grad_enabled():
            self.cuts_tokens = True
            raise ValueError(
                f"sequence parallelism: {length} tokens cannot be shared equally by {size} ranks; pad the sequences to a multiple "
                f"of {size}, or pass sequence=False to tensor_parallel"
            )
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, after the last block of a stack."""
        cut, self.cuts_tokens = self.cuts_tokens, self.sequence
        return regions.all_tokens(x, self.exchange, x.shape[-2] * self.comm.size) if cut else x


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank has spent in exchanges of a model's cut modules, with the waits for other ranks."""
    found = {getattr(module, "ranks", None) for module in model.modules()}
    return sum(ranks.exchange.seconds for ranks in found if isinstance(ranks, TensorRanks))


class RowLayer(nn.Module):
    """A linear layer with this rank's part of the input features. The bias is added to the sum over the ranks."""

    ranks: TensorRanks
    is_cut: bool
    is_transposed: bool
    """Whether the weight has the shape (input features, output features)."""
    splits: bool
    """Whether the input has all features."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., L, this rank's input features) -> (..., L, all output features), of this rank's tokens if tokens are cut."""
        if self.splits:
            input = regions.own_features(input, self.ranks.exchange)
        weight = self.weight.t() if self.is_transposed else self.weight
        y = self.ranks.leave_with_product(input, weight, is_cut=self.is_cut)
        return y if self.bias is None else y + self.bias


class ColumnLayer(nn.Module):
    """A linear layer with this rank's part of the output features: the only one that takes the input of its region."""

    ranks: TensorRanks
    is_transposed: bool
    """Whether the weight has the shape (input features, output features)."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., L, all input features) -> (..., L, this rank's output features)."""
        weight = self.weight.t() if self.is_transposed else self.weight
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, self.bias)
        return regions.column_product(input, weight, self.bias, self.ranks.exchange)


@functools.cache
def cut_class(layer: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a `layer` in place of `kind`, of which it is a subclass."""
    return type(f"{layer.__name__.removesuffix('Layer')}{kind.__name__}", (layer, kind), {})


class VocabularyEmbedding(nn.Embedding):
    """An embedding with this rank's rows. A token of another rank contributes zeros to the sum over the ranks."""

    ranks: TensorRanks
    first: int
    """The token of the first row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) int64 -> (..., C), the same on all ranks."""
        at = input - self.first
        mine = (at >= 0) & (at < len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        if not len(self.weight):  # more ranks than rows: a sum of no rows, through which the gradient still flows
            found = self.weight.sum() + self.weight.new_zeros(*input.shape, self.embedding_dim)
        else:
            found = F.embedding(at.masked_fill(~mine, 0), self.weight, padding).masked_fill(~mine[..., None], 0)
        return regions.add(found, self.ranks.exchange)


class VocabularyCrossEntropy(nn.CrossEntropyLoss):
    """A cross-entropy of logits with this rank's classes."""

    ranks: TensorRanks
    num_classes: int

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(rows, this rank's classes), (rows,) int64 -> the loss, the same on all ranks."""
        return cross_entropy(
            input,
            target,
            self.ranks.comm,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,  # type: ignore[arg-type]  # torch checks it when the loss is called
        )


def enter_region(ranks: TensorRanks, is_cut: bool, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook: the first floating-point tensor is the stream; states of an encoder are whole on all ranks."""
    found_stream = False

    def entered(name: str, value: Any) -> Any:
        nonlocal found_stream
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if not found_stream:
            found_stream = True
            return ranks.enter(value, is_cut=is_cut)
        return regions.copy(value, ranks.exchange) if value.requires_grad and name in _OTHER_STREAMS else value

    args = tuple(entered("", value) for value in args)
    return args, {name: entered(name, value) for name, value in kwargs.items()}


_OTHER_STREAMS = ("key_value_states", "encoder_hidden_states")
"""Arguments by which a transformers model passes the states of its encoder into a region. Other tensors are this rank's own."""


def leave_region(ranks: TensorRanks, is_cut: bool, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of a region whose output is a part of the sum over the ranks."""
    if isinstance(output, torch.Tensor):
        return ranks.leave(output, is_cut=is_cut)
    return type(output)([ranks.leave(output[0], is_cut=is_cut), *output[1:]])


def split_stream(ranks: TensorRanks, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook of the first block of a stack."""
    if args and isinstance(args[0], torch.Tensor):
        return (ranks.split(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.is_floating_point())
    return args, {**kwargs, name: ranks.split(kwargs[name])}


def join_stream(ranks: TensorRanks, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of the last block of a stack."""
    if isinstance(output, torch.Tensor):
        return ranks.join(output)
    return type(output)([ranks.join(output[0]), *output[1:]])


def gather_output(
    ranks: TensorRanks, length: int, is_partial: bool, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """A forward hook: all `length` features of the output. `is_partial`: the ranks' gradients are parts of a sum, as in a region."""
    return regions.gather_features(output, ranks.exchange, length, is_partial=is_partial)
