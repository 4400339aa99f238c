"""The modules that compute with parts of matrices. `tensor_parallel` changes the class of a plain module to one of these."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from collectives import Communicator
from mpitrain.placement.parts import part_of, refuse_pickle
from mpitrain.tensor import regions
from mpitrain.tensor.exchange import Exchange, own_part
from mpitrain.tensor.vocabulary import check_classes, cross_entropy


class TensorRanks:
    """The ranks that hold a model together, and how its stream of activations enters and leaves a region.

    `sequence`: between the regions of a stack of blocks each rank has its own tokens. `cuts_tokens`: whether the stream that passes
    now is cut, which a forward without gradients can do without: see `split`. `stack`: the blocks between which it passes now, by name;
    None outside of stacks. `keeps_logits`: whether the logits of this forward stay
    cut, because the model computes its loss from them.
    """

    def __init__(self, comm: Communicator, *, sequence: bool) -> None:
        self.comm, self.exchange = comm, Exchange(comm)
        self.sequence = self.cuts_tokens = sequence
        self.stack: Sequence[str] | None = None
        self.keeps_logits = False
        # The shape of the stream in a module that gets all tokens, without the features.
        self._widened: torch.Size | None = None
        # The input of the region that runs now, if ranks may share it, and its version.
        self._entered: tuple[torch.Tensor, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorRanks":
        """The same ranks: a model and its copy run one after the other, so they can share the exchanges and their memory."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()

    def enter(self, x: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The stream at the beginning of a region: all tokens. `is_cut`: in a stack whose tokens are cut, if any are."""
        if is_cut and self.cuts_tokens:
            whole = regions.gather_tokens(x, self.exchange, x.shape[-2] * self.comm.size)
            self._entered = None if whole.is_inference() else (whole, whole._version)  # that has no version
            return whole
        return regions.copy(x, self.exchange)

    def leave(self, x: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The sum of the ranks' `x` at the end of a region."""
        self._check_region(x)
        if is_cut and self.cuts_tokens:
            return regions.scatter_tokens(x, self.exchange)
        return regions.add(x, self.exchange)

    def leave_with_product(self, x: torch.Tensor, weight: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """The sum of the ranks' products `x @ weight.t()` at the end of a region."""
        if torch.is_autocast_enabled(x.device.type):  # it casts the operands of torch's own functions
            return self.leave(F.linear(x, weight), is_cut=is_cut)
        self._check_region(x)
        return regions.row_product(x, weight, self.exchange, cuts_tokens=is_cut and self.cuts_tokens)

    def _check_region(self, output: torch.Tensor) -> None:
        """ValueError if the region has written to its input, with which the other ranks compute, too; or if it mixes its dimensions."""
        entered, self._entered = self._entered, None
        if entered is not None and entered[0].shape[:-1] != output.shape[:-1]:
            raise ValueError(
                f"sequence parallelism: a module whose matrices are cut makes an output of shape {tuple(output.shape)} from an input "
                f"of shape {tuple(entered[0].shape)}, so its tokens cannot be told apart; pass sequence=False to tensor_parallel"
            )
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
        if x.ndim > 3:
            raise ValueError(
                f"sequence parallelism needs a stream of the shape (batch, tokens, features) between the blocks, and this model's "
                f"has the shape {tuple(x.shape)}; pass sequence=False to tensor_parallel"
            )
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

    def take_own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a stream that has zeros for all others. No exchange, also not of its gradient."""
        return own_part(x, self.comm, -2).clone(memory_format=torch.contiguous_format)

    def enter_also(self, x: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
        """Another tensor at the beginning of a region, such as the experts of each token and their weights."""
        if is_cut and self.cuts_tokens:
            length = x.shape[-2] * self.comm.size
            if not x.is_floating_point():
                return self.exchange.gather(x, -2, length)
            return regions.gather_tokens(x, self.exchange, length)
        return regions.copy(x, self.exchange) if x.requires_grad else x

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of a stream between regions, for a module that all ranks compute alike."""
        if not self.cuts_tokens:
            return x
        whole = regions.all_tokens(x, self.exchange, x.shape[-2] * self.comm.size)
        self._widened = whole.shape[:-1]
        return whole

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of the output of such a module, which may have put the tokens of all sequences in a row."""
        if not self.cuts_tokens:
            return x
        shape, self._widened = self._widened, None
        if shape is None or shape == x.shape[:-1]:
            return regions.own_tokens(x, self.exchange)
        return regions.own_tokens(x.view(*shape, x.shape[-1]), self.exchange).flatten(0, -2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, after the last block of a stack."""
        cut, self.cuts_tokens = self.cuts_tokens, self.sequence
        return regions.all_tokens(x, self.exchange, x.shape[-2] * self.comm.size) if cut else x


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank has spent in exchanges of a model's cut modules and in sums of gradients, with the waits for others."""
    parts = {part for param in model.parameters() if (part := part_of(param)) is not None}
    return sum(exchange.seconds for exchange in exchanges_of(model)) + sum(part.seconds for part in parts)


def exchanges_of(model: nn.Module) -> list[Exchange]:
    """The exchanges of a model's cut modules, each once."""
    found = {getattr(module, "ranks", None) for module in model.modules()}
    return [ranks.exchange for ranks in found if isinstance(ranks, TensorRanks)]


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
    """A linear layer with this rank's part of the output features."""

    ranks: TensorRanks
    is_alone: bool
    """Whether no other layer takes the input of its region."""
    is_transposed: bool
    """Whether the weight has the shape (input features, output features)."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., L, all input features) -> (..., L, this rank's output features)."""
        weight = self.weight.t() if self.is_transposed else self.weight
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, self.bias)
        return regions.column_product(input, weight, self.bias, self.ranks.exchange if self.is_alone else None)


def features_of(module: Any) -> tuple[int, int] | None:
    """The dimensions of the weight that are input and output features; None for a module without them."""
    if isinstance(module, nn.Linear):
        return 1, 0
    if isinstance(module, nn.Embedding) or _is_conv1d(type(module)):
        return 0, 1
    return None


def has_own_product(module: Any) -> bool:
    """Whether the forward of a linear layer is the plain product, which a cut layer computes in its own way."""
    return type(module).forward is nn.Linear.forward or _is_conv1d(type(module))


def _is_conv1d(kind: type) -> bool:
    """Whether a class is transformers' linear layer of GPT-2, or is made from it by `cut_class`."""
    return any(base.__name__ == "Conv1D" for base in kind.__mro__)


@functools.cache
def cut_class(layer: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a `layer` in place of `kind`, of which it is a subclass."""
    return type(f"{layer.__name__.removesuffix('Layer')}{kind.__name__}", (layer, kind), {})


class VocabularyEmbedding(nn.Embedding):
    """An embedding with this rank's rows. A token of another rank contributes zeros to the sum over the ranks."""

    ranks: TensorRanks
    first: int
    """The token of the first row."""
    is_partial: bool
    """Whether each rank computes a part of the gradient of the output, as in a region."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) int64 -> (..., C), the same on all ranks."""
        check_classes(input, self.num_embeddings, "token")
        at = input - self.first
        mine = (at >= 0) & (at < len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        if not len(self.weight):  # more ranks than rows: a sum of no rows, through which the gradient still flows
            found = self.weight.sum() + self.weight.new_zeros(*input.shape, self.embedding_dim)
        else:
            found = F.embedding(at.masked_fill(~mine, 0), self.weight, padding).masked_fill(~mine[..., None], 0)
        found = regions.add(found, self.ranks.exchange)
        return regions.copy(found, self.ranks.exchange) if self.is_partial else found


@functools.cache
def vocabulary_class(kind: type[nn.Embedding]) -> type[VocabularyEmbedding]:
    """The class of a `VocabularyEmbedding` in place of `kind`, which may change what `super().forward` returns: by a scale, or a norm.

    ValueError if the forward of `kind` does not call `super().forward`.
    """
    if kind.forward is nn.Embedding.forward:
        return VocabularyEmbedding
    if "__class__" not in kind.forward.__code__.co_freevars:
        raise ValueError(
            f"a cut embedding does not support the forward of {kind.__name__}, which does not call super()"
        )
    return type(f"Vocabulary{kind.__name__}", (kind, VocabularyEmbedding), {})


class PartOnce(nn.Module):
    """A module whose output is a part of a sum over N ranks. Of the parameters in `once`, which are not cut, it computes with 1/N."""

    ranks: TensorRanks
    once: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        found: Any = super().__getattr__(name)
        return found / self.ranks.comm.size if name in self.__dict__["once"] else found


class VocabularyCrossEntropy(nn.CrossEntropyLoss):
    """A cross-entropy of logits with this rank's classes. `observers`: see `mpitrain.models.loss.Observer`."""

    ranks: TensorRanks
    num_classes: int
    observers: Sequence[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = ()

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(N, this rank's classes, ...), (N, ...) int64 -> the loss, the same on all ranks; see `cross_entropy`."""

        def show(losses: torch.Tensor) -> None:
            for observe in self.observers:
                observe(input.detach(), target, losses)

        return cross_entropy(
            input,
            target,
            self.ranks.exchange,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,  # type: ignore[arg-type]  # `cross_entropy` checks it
            show=show,
        )
