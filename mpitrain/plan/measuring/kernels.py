"""What a rank computes in a step, measured while all ranks compute."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from collectives.bench.kit.turns import Contestant, mean_rank
from mpitrain.plan.measuring.constants import Constant
from mpitrain.plan.measuring.rig import Calls, Gradients, Rig, take_turns_within
from mpitrain.tensor.products import product
from mpitrain.train.hardware import matmul_flops_per_s

HEADS, BATCH, CLASSES = 12, 2, 4096
SMALL = 200
"""Operations on very few numbers that are timed together."""


class Sizes(NamedTuple):
    """Of the operations. Each operation but the smallest takes at least tens of microseconds."""

    tokens: int
    """Of BATCH sequences."""
    width: int
    parameters: int
    """So many that the arrays of an optimizer exceed the caches."""


ON_CPU, ON_GPU = Sizes(512, 768, 1 << 23), Sizes(8192, 3072, 1 << 26)


def kernels(rig: Rig, until: float) -> dict[str, dict[str, Constant]]:
    """The constants of a rank's computation, by section of the machine file. Collective; until `perf_counter` is `until`."""
    comm, sizes = rig.comm, ON_GPU if rig.device.type == "cuda" else ON_CPU
    series = mean_rank(comm, take_turns_within(comm, _contestants(rig, sizes), until))
    peak = sum(comm.all_gather_object(matmul_flops_per_s(rig.device, rig.dtype))) / comm.size
    return constants({key: float(np.median(taken)) for key, taken in series.items()}, peak, sizes, rig.dtype.itemsize)


def constants(
    taken: Mapping[tuple[str, str], float], peak_flops: float, sizes: Sizes, itemsize: int
) -> dict[str, dict[str, Constant]]:
    """The constants from the seconds of each contestant and action."""
    tokens, width, parameters = sizes
    wide = 4 * width

    def pair(name: str, forward: float, backward: float) -> tuple[float, float]:
        return taken[name, "forward"] / forward, taken[name, "backward"] / backward

    def rate(name: str, forward: float, backward: float) -> tuple[float, float]:
        return forward / taken[name, "forward"], backward / taken[name, "backward"]

    flops, causal = 2 * tokens * width * wide, 2 * tokens * (tokens // BATCH) * width
    product, attention = rate("linear", flops, 2 * flops), rate("attention", causal, 2.5 * causal)
    product_flops, attention_flops = (
        3 / (1 / product[0] + 2 / product[1]),
        3.5 / (1 / attention[0] + 2.5 / attention[1]),
    )
    peak = max(peak_flops, product_flops)
    norm, gelu = pair("norm", tokens * width, tokens * width), pair("gelu", tokens * wide, tokens * wide)
    residual = taken["residual", "call"] / (tokens * width)
    copied = 2 * 4 * parameters / taken["copy", "call"]
    # In widths of a token, forward and backward: a norm reads and writes 2 + 3, a sum 3 + 2, and a GELU 2 + 3 of four widths.
    streamed = itemsize * (2 * 5 + 2 * 5 + 4 * 5) / (2 * sum(norm) + 4 * residual + 4 * sum(gelu))
    linear = f"a linear layer with its bias, {tokens:,} x {width:,} by {width:,} x {wide:,}"
    causal_attention = f"causal attention of {BATCH} x {tokens // BATCH:,} tokens, {HEADS} heads"
    return {
        "": {
            "flops": Constant(peak, "A square product: the best of 20."),
            "memory_bandwidth": Constant(copied, f"Copies of {parameters:,} fp32 numbers, which are read and written."),
            "launch_s": Constant(taken["small", "call"], f"An addition to one number, {SMALL} in turn."),
        },
        "efficiency": {
            "product": Constant(product_flops / peak, f"Forward and backward of {linear}."),
            "attention": Constant(min(attention_flops / peak, 1.0), f"Forward and backward of {causal_attention}."),
            # At most 1: what fits the cache may be faster than the memory.
            "stream": Constant(min(streamed / copied, 1.0), "Two norms, two sums and a GELU of a block, forward and backward."),
        },
        "kernels": {
            "product_flops": Constant(product, f"Of {linear}."),
            "cut_product_flops": Constant(
                (flops / taken["cut forward", "call"], 2 * flops / taken["cut backward", "call"]),
                "The same products of a tensor-parallel layer, without bias and autograd.",
            ),
            "attention_flops": Constant(attention, f"Of {causal_attention}; the masked half is not counted."),
            "norm_s": Constant(norm, f"A layer norm of {tokens:,} x {width:,}, per element."),
            "gelu_s": Constant(gelu, f"GELU (tanh) of {tokens:,} x {wide:,}, per element."),
            "residual_s": Constant(residual, f"A sum of {tokens:,} x {width:,}, per element."),
            "loss_s": Constant(
                pair("loss", tokens * CLASSES, tokens * CLASSES), f"Cross entropy of {tokens:,} x {CLASSES:,}, fp32, per logit."
            ),
            "operation_s": Constant(pair("small with autograd", SMALL, SMALL), f"A sum of 8 numbers, {SMALL} in turn."),
            "update_s": Constant(taken["update", "call"] / parameters, f"AdamW, fused, of {parameters:,} parameters."),
            "grad_norm_s": Constant(taken["grad norm", "call"] / parameters, f"The norm of {parameters:,} gradients."),
            "add_s": Constant(taken["add", "call"] / parameters, f"a += b of {parameters:,} fp32 numbers."),
        },
    }  # fmt: skip


def _contestants(rig: Rig, sizes: Sizes) -> dict[str, Contestant]:
    tokens, width, parameters = sizes
    generator = torch.Generator(rig.device).manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = rig.dtype, grad: bool = True) -> torch.Tensor:
        values = torch.randn(*shape, device=rig.device, dtype=torch.float32, generator=generator)
        return values.to(dtype).requires_grad_(grad)

    x, weight, bias = drawn(tokens, width), drawn(4 * width, width), drawn(4 * width)
    x_, weight_, grad = (t.detach() for t in (x, weight, drawn(tokens, 4 * width)))
    x_next = drawn(tokens, width, grad=False)
    heads = drawn(BATCH, tokens // BATCH, 3, HEADS, width // HEADS)
    targets = torch.randint(CLASSES, (tokens,), device=rig.device, generator=generator)
    one, few = torch.zeros(1, device=rig.device), torch.zeros(8, device=rig.device, requires_grad=True)
    a, b = (drawn(parameters, dtype=torch.float32, grad=False) for _ in range(2))

    def cut_backward() -> None:
        product(grad, weight_)
        product(grad.t(), x_)

    def small_with_autograd(z: torch.Tensor) -> torch.Tensor:
        for _ in range(SMALL):
            z = z + 1
        return z

    forward_backward = partial(Gradients, rig)
    return {
        "linear": forward_backward(F.linear, (x, weight, bias)),
        "cut forward": Calls(rig, lambda: product(x_, weight_.t())),
        "cut backward": Calls(rig, cut_backward),
        "attention": forward_backward(_attention, (heads,)),
        "norm": forward_backward(partial(_norm, width), (x, drawn(width), drawn(width))),
        "gelu": forward_backward(partial(F.gelu, approximate="tanh"), (drawn(tokens, 4 * width),)),
        "residual": Calls(rig, lambda: x_ + x_next),
        "loss": forward_backward(lambda y: F.cross_entropy(y, targets), (drawn(tokens, CLASSES, dtype=torch.float32),)),
        "small with autograd": forward_backward(small_with_autograd, (few,)),
        "small": Calls(rig, lambda: one.add_(1), SMALL),
        "copy": Calls(rig, lambda: a.copy_(b)),
        "add": Calls(rig, lambda: a.add_(b)),
        "grad norm": Calls(rig, lambda: float(torch._foreach_norm([b], 2.0)[0])),
        "update": Calls(rig, _adamw(drawn(parameters, dtype=torch.float32), b)),
    }


def _attention(qkv_BL3HD: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """As in the GPT of this package, with the change of order of its heads."""
    b, l, *_ = qkv_BL3HD.shape  # noqa: E741
    q, k, v = qkv_BL3HD.permute(2, 0, 3, 1, 4).unbind()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, l, -1)


def _norm(width: int, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (width,), scale, shift)


def _adamw(parameter: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    return lambda: optimizer.step()
