"""AdamW and SGD without torch's compiler, and updates of elements whose bits do not depend on the cut into shards.

[Note: whole vectors] torch's fused kernels on CPUs update a tensor in whole vectors, and the elements after the last whole vector, its
tail, one by one. The compiler rounds the two loops differently: it joins other products and sums to fused multiply-adds. So the bits of
an element depend on where its shard ends. For parameters with `Spread.is_ordered` the same kernel also updates a copy of the tail that
is padded to a whole vector, and these results replace those of the tail. Threads share a tensor in units of whole vectors, so a tail is
only at its end.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import Adam

from mpitrain.placement.marks import spread_of
from mpitrain.torch_glue.uncompiled import Uncompiled, plain

UNIT_BYTES = 64
"""torch's fused kernels on CPUs share a tensor among threads in such units: a vector of AVX-512, two of AVX2."""


class WholeVectors(Uncompiled):
    """A base of torch's element-wise optimizers that have a fused kernel [Note: whole vectors]."""

    torch_step: Callable[[], Any]
    """torch's `step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = self._step_on_tails()
        self.torch_step()
        for tail, copy, state in stepped:
            tail.put_back(copy, tail.of)
            for name, value in state.items():
                if _is_alike(value, copy):
                    tail.put_back(value, self.state[tail.of][name])
        return loss

    def _step_on_tails(self) -> list[tuple["_Tail", torch.Tensor, dict[str, Any]]]:
        """Take the step on copies of the tails. Returns the tails, each with its copy and the new state of the copy."""
        groups = self.param_groups
        tails = [_tails(group["params"]) if group["fused"] else [] for group in groups]
        if not any(tails):
            return []
        copies = [[self._copy_of(tail) for tail in its] for its in tails]
        self.param_groups = [group | {"params": its} for group, its in zip(groups, copies, strict=True)]
        try:
            self.torch_step()
        finally:
            self.param_groups = groups
            states = [self.state.pop(copy, {}) for copy in chain(*copies)]
        return list(zip(chain(*tails), chain(*copies), states, strict=True))

    def _copy_of(self, tail: "_Tail") -> torch.Tensor:
        """A parameter that is the tail in padded memory, with its gradient and its state."""
        param = tail.of
        assert param.grad is not None
        copy = tail.padded(param)
        copy.grad = tail.padded(param.grad)
        for name, value in self.state.get(param, {}).items():
            is_tensor = isinstance(value, torch.Tensor)
            self.state[copy][name] = (
                tail.padded(value) if _is_alike(value, param) else value.clone() if is_tensor else value
            )
        return copy


class AdamW(WholeVectors, torch.optim.AdamW):
    """torch's AdamW for programs that compile nothing: the same numbers, a faster start.

    With slices (`fully_shard(..., slices=)`) an element gets the same bits however the model is sharded, also with `fused=True`.
    """

    torch_step = plain(Adam.step)


class SGD(WholeVectors, torch.optim.SGD):
    """torch's SGD for programs that compile nothing: the same numbers, a faster start.

    With slices (`fully_shard(..., slices=)`) an element gets the same bits however the model is sharded, also with `fused=True`.
    """

    torch_step = plain(torch.optim.SGD.step)


def adamw_in_whole_vectors(
    adamw: Callable[..., None],
    params: Sequence[torch.Tensor],
    lists: Sequence[list[torch.Tensor]],
    steps: list[torch.Tensor],
) -> None:
    """Call one of torch's functions of AdamW, so that an element's bits do not depend on the cut [Note: whole vectors].

    `adamw`: the function, with all its settings. `params`: their marks tell which elements this matters for. `lists`: what is updated,
    the gradients and both running means; each list has one tensor for each of `params`. `steps`: the number of each one's step.
    """
    tails = [(i, tail) for i, param in enumerate(params) if (tail := _tail_of(param, lists[0][i])) is not None]
    copies = [[tail.padded(tensors[i]) for i, tail in tails] for tensors in lists]
    if tails:
        adamw(*copies, [], [steps[i].clone() for i, _ in tails])
    adamw(*lists, [], steps)
    for tensors, its in zip(lists, copies, strict=True):
        for (i, tail), copy in zip(tails, its, strict=True):
            tail.put_back(copy, tensors[i])


class _Tail(NamedTuple):
    """The elements of a tensor, and of others in the same layout, after the last whole vector."""

    of: torch.Tensor
    num_elements: int

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tail of a tensor, padded with zeros to a whole vector."""
        copy = tensor.new_zeros(UNIT_BYTES // tensor.element_size())
        copy[: self.num_elements] = tensor.reshape(-1)[-self.num_elements :]
        return copy

    def put_back(self, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write a padded copy to the tail of the tensor."""
        tensor.view(-1)[-self.num_elements :] = copy[: self.num_elements]


def _tail_of(param: torch.Tensor, tensor: torch.Tensor) -> _Tail | None:
    """The tail of a tensor that a fused kernel updates for a parameter; None if there is none, or the parameter needs no order."""
    count = tensor.numel() % (UNIT_BYTES // tensor.element_size())
    if not count or tensor.device.type != "cpu":  # on GPUs a fused kernel has one code for all elements
        return None
    spread = spread_of(param)
    return _Tail(tensor, count) if spread is not None and spread.is_ordered else None


def _tails(params: Iterable[torch.Tensor]) -> list[_Tail]:
    """The tails of the parameters with a gradient."""
    tails = (_tail_of(param, param) for param in params if param.grad is not None)
    return [tail for tail in tails if tail is not None]


def _is_alike(value: Any, param: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state has an element for each one of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape
