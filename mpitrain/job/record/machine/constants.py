"""The constants that a machine file may have beside the limits of the hardware, as plain data."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import inf, log

Sizes = tuple[tuple[float, float], ...]
"""(bytes, seconds) of the same operation."""


@dataclass(frozen=True)
class KernelConstants:
    """The section [kernels]: times on this machine in place of shares of its limits. Pairs are of forward and backward.

    On CPUs the kernels of a step differ by a factor of ten in the share of the memory's bandwidth that they reach, and tensors that
    fit the cache are faster than the memory.
    """

    product_flops: tuple[float, float]
    """FLOP/s of a linear layer with its bias: 2 x rows x inputs x outputs forward, twice this backward. Without `weight_s`."""
    cut_product_flops: tuple[float, float]
    """The same of a layer that is cut over ranks or in a stage of a pipeline, which may use another library."""
    weight_s: tuple[float, float]
    """Seconds that such a layer takes for each of its weights, however few rows there are: it reads them from memory."""
    attention_flops: tuple[tuple[float, float, float], ...]
    """(keys, FLOP/s forward, FLOP/s backward) of causal attention by the length of the sequence, which increases: 2 x tokens x keys x
    width forward, without the masked half; 2.5 times this backward. Kernels take other blocks for other lengths."""
    norm_s: tuple[float, float]
    """Seconds of a layer norm, per element."""
    gelu_s: tuple[float, float]
    """Seconds of GELU (tanh), per element of the feed-forward layer."""
    residual_s: float
    """Seconds of a sum with the residual, per element. The backward has such a sum of two gradients, too."""
    loss_s: tuple[float, float]
    """Seconds of the cross entropy, per logit."""
    operation_s: tuple[float, float]
    """Seconds of an operation on very few numbers, with autograd."""
    update_s: float
    """Seconds of AdamW (fused), per parameter."""
    grad_norm_s: float
    """Seconds of the norm of gradients, per parameter."""
    add_s: float
    """Seconds of adding a gradient to one of an earlier micro-batch, per parameter."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = [*chain.from_iterable(value)] if field.name == "attention_flops" else value
            least_is_zero = field.name == "weight_s"
            for number in numbers if isinstance(numbers, list | tuple) else (numbers,):
                if not (number > 0 or (least_is_zero and number == 0)):
                    raise ValueError(f"kernels.{field.name}: expected positive numbers, got {value}")
        lengths = [length for length, *_ in self.attention_flops]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"kernels.attention_flops: expected lengths that increase, got {lengths}")

    def product_s(self, rows: float, inputs: float, outputs: float, *, is_cut: bool = False) -> tuple[float, float]:
        """Seconds of a layer, forward and backward."""
        weights = inputs * outputs
        forward, backward = self.cut_product_flops if is_cut else self.product_flops
        flops = 2 * rows * weights
        return flops / forward + weights * self.weight_s[0], 2 * flops / backward + weights * self.weight_s[1]

    def attention_s(self, tokens: float, keys: float, width: float) -> tuple[float, float]:
        """Seconds of causal attention of whole sequences, forward and backward. Between two lengths the rate is interpolated."""
        lengths, forward, backward = zip(*self.attention_flops, strict=True)
        flops = 2 * tokens * keys * width
        return flops / _between(keys, lengths, forward), 2.5 * flops / _between(keys, lengths, backward)


def _between(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The value at `x`, on lines over the logarithm of the places; beyond them the nearest one's."""
    at = bisect(places, x)
    if at in (0, len(places)):
        return values[max(at - 1, 0)]
    share = log(x / places[at - 1]) / log(places[at] / places[at - 1])
    return values[at - 1] * (1 - share) + values[at] * share


@dataclass(frozen=True)
class Links:
    """The section [links]: (bytes, seconds) of each kind of communication, for several sizes, which increase.

    Within a node of all its ranks, then between `num_nodes` nodes of one rank of each. The bytes are those of the whole array, as in
    `python -m collectives bench`. None: these ranks have no such link.
    """

    num_nodes: int = 1
    node_all_reduce: Sizes | None = None
    node_all_gather: Sizes | None = None
    node_reduce_scatter: Sizes | None = None
    node_message: Sizes | None = None
    node_gather_tokens: Sizes | None = None
    """An all-gather of tensor parallelism, into one array in node memory. Each rank writes its part. A product reads the array; what
    it takes longer than without the exchange counts, too. The same holds for the other two."""
    node_scatter_tokens: Sizes | None = None
    """A reduce-scatter of tensor parallelism. A product writes its result into the node's memory, and each rank reads its part of all
    results."""
    node_sum_tokens: Sizes | None = None
    """An all-reduce of tensor parallelism in the node's memory."""
    all_reduce: Sizes | None = None
    all_gather: Sizes | None = None
    reduce_scatter: Sizes | None = None
    message: Sizes | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            sizes = getattr(self, field.name)
            if field.name == "num_nodes" or sizes is None:
                continue
            places = [nbytes for nbytes, _ in sizes]
            if not places or places != sorted(set(places)) or not all(seconds > 0 for _, seconds in sizes):
                raise ValueError(f"links.{field.name}: expected sizes that increase, and positive seconds, got {sizes}")

    def seconds(self, name: str, nbytes: float) -> float | None:
        """Of one kind, by the name of its field; None if it was not measured.

        On a line between two sizes; beyond the largest in proportion; as long as the smallest below that.
        """
        sizes: Sizes | None = getattr(self, name)
        if sizes is None:
            return None
        places, seconds = zip(*sizes, strict=True)
        at = bisect(places, nbytes)
        if at == 0:
            return seconds[0]
        if at == len(places):
            return seconds[-1] * nbytes / places[-1]
        share = (nbytes - places[at - 1]) / (places[at] - places[at - 1])
        return seconds[at - 1] * (1 - share) + seconds[at] * share


Overhead = tuple[float, float, float]
"""Seconds of a step, of a micro-batch, and of a block in a micro-batch, forward and backward."""


@dataclass(frozen=True)
class Overheads:
    """The section [overheads]: what a step takes in addition to the work of kernels and links, however small the model is.

    It is the time of Python and torch, and of the ranks that wait for each other at each exchange. On GPUs the kernels' queue hides it.
    A field is None if these ranks cannot run such a layout.
    """

    data: Overhead
    """Of data parallelism, with full parameters on each rank."""
    gathered: Overhead
    """Of ZeRO stage 3 whose ranks gather the parameters of each block."""
    block_again_s: float
    """Of a block that is computed again in the backward."""
    tensor: Overhead | None = None
    """Of tensor parallelism without sequence parallelism."""
    sequence: Overhead | None = None
    """Of tensor parallelism with sequence parallelism."""
    stages: Overhead | None = None
    """Of a pipeline. The second number is that of a micro-batch on one stage."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = (value,) if isinstance(value, float | int) else value or ()
            if not all(0 <= number < inf for number in numbers):
                raise ValueError(f"overheads.{field.name}: expected seconds of at least 0, got {value}")
