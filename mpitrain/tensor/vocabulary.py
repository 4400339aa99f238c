"""An embedding and a cross-entropy whose vocabulary is cut over ranks. The logits of a token are never gathered."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from collectives import Communicator
from mpitrain.placement.parts import bounds
from mpitrain.tensor.exchange import Exchange

_CHUNK_ELEMENTS = 1 << 22  # of logits that are converted to the dtype of the loss at once
_LEAST_EXPONENT = (
    -1e4
)  # exp of it is 0, and so is its product with it: that of a masked class, or a rank without classes, would be NaN


class _CrossEntropy(Function):
    """The loss of each row. One message holds four numbers of each row and rank: see `cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        exchange: Exchange,
        num_classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        edges = bounds(num_classes, exchange.comm.size)
        rows, first = len(logits), edges[exchange.comm.rank]
        mine = (targets >= first) & (targets < first + logits.shape[1])
        at = (targets - first).masked_fill(~mine, 0)
        # Of each row, over this rank's classes: the largest logit, the sum of exp(logit - largest), the target's logit, and for
        # smoothing the sum of logit - largest.
        own = torch.zeros(4, rows, dtype=_dtype_of_loss(logits), device=logits.device)
        own[0] = -torch.inf
        for part in _chunks(logits) if logits.shape[1] else ():
            x = logits[part].to(own.dtype, copy=True)
            own[0, part] = largest = x.amax(1)
            own[2, part] = x.gather(1, at[part, None])[:, 0]
            x.sub_(_finite(largest)[:, None])
            if smoothing:
                own[3, part] = x.sum(1)
            own[1, part] = x.exp_().sum(1)
        own[2].masked_fill_(~mine, 0)
        everywhere = exchange.gather(own[None], -3, exchange.comm.size)  # (N, 4, rows)
        largest = everywhere[:, 0].amax(0)
        # All logits are taken less the row's largest one: added to the logarithm, it would take digits of the loss.
        shift = _finite(largest)
        log_sum = (everywhere[:, 1] * (everywhere[:, 0] - largest).exp()).sum(0).log()
        loss = log_sum - (1 - smoothing) * (everywhere[:, 2].sum(0) - shift)
        if smoothing:
            num_own = everywhere.new_tensor([end - begin for begin, end in pairwise(edges)])[:, None]
            moved = everywhere[:, 3] + num_own * (_finite(everywhere[:, 0]) - shift)
            loss -= smoothing / num_classes * moved.sum(0)
        counts = targets != ignore_index
        ctx.save_for_backward(logits, log_sum, shift, at, mine, counts)
        ctx.smoothing, ctx.num_classes = smoothing, num_classes
        return loss.masked_fill_(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, log_sum, shift, at, mine, counts = ctx.saved_tensors
        grad = grad.masked_fill(~counts, 0)  # not a product: the gradient of a mean over no rows is infinite
        of_target = mine.to(log_sum.dtype) * (1 - ctx.smoothing)
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            x = torch.sub(logits[part].to(log_sum.dtype), shift[part, None]).sub_(log_sum[part, None]).exp_()
            if ctx.smoothing:
                x -= ctx.smoothing / ctx.num_classes
            if x.shape[1]:
                x[torch.arange(len(x), device=x.device), at[part]] -= of_target[part]
            out[part] = x.mul_(grad[part, None])
        return out, None, None, None, None, None


Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    comm: Communicator | Exchange,
    *,
    num_classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    show: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits whose classes are cut over the ranks of `comm`. Collective.

    Args:
        logits: (C,), (N, C) or (N, C, d1, ...), floating-point, with C classes of this rank. Classes may be masked with -inf, also all
            of a rank.
        targets: (), (N,) or (N, d1, ...) int64, the same on all ranks.
        comm: the ranks, or their exchange, which then counts the time.
        num_classes: of all ranks together; rank r of R has classes `num_classes * r // R` to `num_classes * (r + 1) // R - 1`.
        ignore_index: positions with this target count nothing. On CPUs any other target out of range is an IndexError.
        label_smoothing: as torch's.
        reduction: "mean", "sum" or "none".
        show: gets the loss of each position, of the shape of `targets` and without gradients, whatever the reduction.

    Returns: the loss in float32, or in float64 for float64 logits, the same on all ranks: with "none" of the shape of `targets`, and
    with "mean" NaN if no position counts; the gradients are zeros then.

    Raises ValueError for logits without this rank's classes (such as gathered ones), for targets of another shape, for probabilities of
    classes as targets, and for another reduction.

    The ranks exchange four numbers for each position, after Megatron-LM (1909.08053, section 3). The backward computes the
    probabilities again from the logits, some rows at a time, so it keeps nothing but the logits.
    """
    exchange = comm if isinstance(comm, Exchange) else Exchange(comm, by_messages=True)
    _check(logits, targets, exchange.comm, num_classes, reduction)
    check_classes(targets, num_classes, "target", ignored=ignore_index)
    last = logits.movedim(min(logits.ndim - 1, 1), -1)
    rows = last.reshape(targets.numel(), last.shape[-1])
    each: torch.Tensor = _CrossEntropy.apply(
        rows, targets.reshape(-1), exchange, num_classes, ignore_index, label_smoothing
    )
    if show is not None:
        show(each.detach().view(targets.shape))
    if reduction == "none":
        return each.view(targets.shape)
    return each.sum() if reduction == "sum" else each.sum() / (targets != ignore_index).sum()


@torch.no_grad()
def entropy(logits: torch.Tensor, exchange: Exchange | None = None) -> torch.Tensor:
    """The entropy of the distribution that each row of logits stands for, `-sum p log p` in nats. Collective if there is an `exchange`.

    logits: (N, C) floating-point; with an exchange C classes of this rank, and the ranks exchange three numbers for each row. Returns
    (N,) float32, or float64 for such logits, the same on all ranks. A class with -inf adds nothing; a row of such classes alone is NaN.
    """
    own = torch.zeros(3, len(logits), dtype=_dtype_of_loss(logits), device=logits.device)
    # Of each row, over this rank's classes: the largest logit, and with d = logit - largest the sums of exp(d) and of d exp(d).
    own[0] = -torch.inf
    for part in _chunks(logits) if logits.shape[1] else ():
        x = logits[part].to(own.dtype, copy=True)
        own[0, part] = largest = x.amax(1)
        below = x.sub_(_finite(largest)[:, None])
        exps = below.exp()
        own[1, part], own[2, part] = exps.sum(1), below.clamp_(min=_LEAST_EXPONENT).mul_(exps).sum(1)
    everywhere = own[None] if exchange is None else exchange.gather(own[None], -3, exchange.comm.size)  # (R, 3, N)
    below = everywhere[:, 0] - everywhere[:, 0].amax(0)
    factor = below.exp()
    total = (everywhere[:, 1] * factor).sum(0)
    weighted = (everywhere[:, 2] * factor + everywhere[:, 1] * factor * below.clamp(min=_LEAST_EXPONENT)).sum(0)
    return total.log() - weighted / total


def _check(logits: torch.Tensor, targets: torch.Tensor, comm: Communicator, num_classes: int, reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"cross_entropy: reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if targets.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy: expected targets of torch.int64, the numbers of classes, got {targets.dtype}; probabilities of classes as "
            "targets need whole logits, so gather them (gathers=True in the style of the head) and use torch's own cross_entropy"
        )
    edges = bounds(num_classes, comm.size)
    own = edges[comm.rank + 1] - edges[comm.rank]
    shape = tuple(targets.shape)
    expected = (*shape[:1], own, *shape[1:])
    if tuple(logits.shape) != expected:
        raise ValueError(
            f"cross_entropy: expected logits of the shape {expected}, with this rank's {own} of {num_classes} classes, for targets of "
            f"the shape {shape}, got {tuple(logits.shape)}; pass the logits of a column layer, not gathered, and a target for each"
        )


def check_classes(values: torch.Tensor, num_classes: int, what: str, *, ignored: int | None = None) -> None:
    """IndexError for a token or target out of range, as in torch. On GPUs the host would have to wait for the check."""
    if type(values) is not torch.Tensor or values.device.type != "cpu":
        return
    values = values if ignored is None else values[values != ignored]
    if not values.numel():
        return
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= num_classes:
        raise IndexError(f"{what} {least if least < 0 else most} is out of range; expected 0 to {num_classes - 1}")


def _dtype_of_loss(logits: torch.Tensor) -> torch.dtype:
    """float32, or float64 for such logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """What is subtracted from logits before `exp`. If all are -inf, as masked classes are, their exponentials are 0, not NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(_CHUNK_ELEMENTS // max(logits.shape[1], 1), 1)
    return [slice(start, min(start + rows, len(logits))) for start in range(0, len(logits), rows)]
