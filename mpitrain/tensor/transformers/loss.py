"""The loss of a transformers language model, from logits whose vocabulary is cut over ranks.

Such a model computes `self.loss_function(logits=..., labels=..., vocab_size=...)`, which is a function of the library. If a caller
passes labels, the logits stay cut, and the function is one that computes the same from each rank's part. Between head and loss a model
may change each logit by itself, by a scale or a soft cap.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.tensor.layers import TensorRanks
from mpitrain.tensor.vocabulary import cross_entropy

_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""The losses that are computed from parts of the logits, and whether each token's label is the next token."""


def computes_loss(model: Any) -> bool:
    """Whether the forward of a model passes the logits of its whole vocabulary to one of the library's losses in `_SHIFTS`.

    The names in the code of the forward tell it. A forward with a cross-entropy of its own, or with another size of a vocabulary, may
    do something else with the logits.
    """
    forward = inspect.unwrap(type(model).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    others = [
        name
        for name in names
        if name in ("CrossEntropyLoss", "cross_entropy") or ("vocab" in name and name != "vocab_size")
    ]
    if "loss_function" not in names or "vocab_size" not in names or others:
        return False
    loss: Any = getattr(model, "loss_function", None)
    return getattr(loss, "__module__", "") == "transformers.loss.loss_utils" and loss.__name__ in _SHIFTS


def cut_loss(model: Any, ranks: TensorRanks, num_classes: int) -> None:
    """Let a model compute its loss from cut logits, if a caller passes labels. The output then has no logits."""
    loss = _CutLoss(model, ranks, num_classes)
    model.loss_function = loss
    model.register_forward_pre_hook(loss.begin, with_kwargs=True)
    model.register_forward_hook(loss.end, always_call=True)


class _CutLoss:
    """In the place of a loss of the library, `model.loss_function`."""

    def __init__(self, model: Any, ranks: TensorRanks, num_classes: int) -> None:
        self._ranks, self._num_classes, self._library_loss = ranks, num_classes, model.loss_function
        names = list(inspect.signature(model.forward).parameters)
        self._at = names.index("labels") if "labels" in names else len(names)  # of the labels in the arguments

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        if not self._ranks.keeps_logits:  # whole logits, from a caller's own code
            whole: torch.Tensor = self._library_loss(logits, labels, vocab_size, **kwargs)
            return whole
        if vocab_size != self._num_classes:
            raise ValueError(
                f"the loss expects {vocab_size} classes (vocab_size of the config), and the head has {self._num_classes}"
            )
        shifts = _SHIFTS[self._library_loss.__name__]
        return _vocabulary_loss(logits, labels, self._ranks, self._num_classes, shifts=shifts, **kwargs)

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the model."""
        labels = args[self._at] if self._at < len(args) else kwargs.get("labels")
        self._ranks.keeps_logits = module.loss_function is self and labels is not None

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook of the model, also called after an exception."""
        kept, self._ranks.keeps_logits = self._ranks.keeps_logits, False
        return None if output is None or not kept else _without_logits(output)  # None: the forward has raised an error


def _vocabulary_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ranks: TensorRanks,
    num_classes: int,
    *,
    shifts: bool,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`ForCausalLMLoss`, or `ForMaskedLMLoss`, of (B, L, this rank's classes) logits. Collective. It takes any `kwargs`, as they do."""
    if not shifts:
        shift_labels = labels
    elif shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = cross_entropy(
        logits.flatten(0, -2),
        shift_labels.flatten().to(logits.device),
        ranks.exchange,
        num_classes=num_classes,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / torch.as_tensor(num_items_in_batch, device=loss.device)


def _without_logits(output: Any) -> Any:
    """The output of a model without its logits. In a tuple they follow the loss."""
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
