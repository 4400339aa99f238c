"""What a rank computes in a step, measured while all ranks compute."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from collectives.bench.kit.turns import Contestant, mean_rank
from mpitrain.job.train.hardware import matmul_flops_per_s
from mpitrain.tools.plan.measuring.constants import MeasuredConstant
from mpitrain.tools.plan.measuring.rig import Calls, ForwardBackward, Rig, take_turns_within
from mpitrain.torch_glue.products import product

CLASSES = 4096
FEW_ROWS = 64
HEAD, LENGTHS = 64, (128, 256, 1024)
"""The width of an attention head, and the lengths of the sequences: torch's kernel for CPUs has other blocks from 192 and from 768."""
SMALL = 200
"""Operations on very few numbers that are timed together."""


class KernelSizes(NamedTuple):
    """Of the operations. Each operation but the smallest takes at least tens of microseconds."""

    tokens: int
    width: int
    parameters: int
    """So many that the arrays of an optimizer exceed the caches."""


ON_CPU, ON_GPU = KernelSizes(512, 768, 1 << 23), KernelSizes(8192, 3072, 1 << 26)


def kernels(rig: Rig, until: float) -> dict[str, dict[str, MeasuredConstant]]:
    """The constants of a rank's computation, by section of the machine file. Collective; until `perf_counter` is `until`."""
    comm, sizes = rig.comm, ON_GPU if rig.device.type == "cuda" else ON_CPU
    series = mean_rank(comm, take_turns_within(comm, _contestants(rig, sizes), until))
    peak = sum(comm.all_gather_object(matmul_flops_per_s(rig.device, rig.dtype))) / comm.size
    return constants({key: float(np.median(taken)) for key, taken in series.items()}, peak, sizes, rig.dtype.itemsize)


def constants(
    taken: Mapping[tuple[str, str], float], peak_flops: float, sizes: KernelSizes, itemsize: int
) -> dict[str, dict[str, MeasuredConstant]]:
    """The constants from the seconds of each contestant and action."""
    tokens, width, parameters = sizes
    wide = 4 * width

    def pair(name: str, forward: float, backward: float) -> tuple[float, float]:
        return taken[name, "forward"] / forward, taken[name, "backward"] / backward

    def rate(name: str, forward: float, backward: float) -> tuple[float, float]:
        return forward / taken[name, "forward"], backward / taken[name, "backward"]

    weights, flops = width * wide, 2 * tokens * width * wide
    for_weights = [
        _fixed((FEW_ROWS, taken["few rows", action]), (tokens, taken["linear", action]))
        for action in ("forward", "backward")
    ]

    def of_rows(forward: float, backward: float) -> tuple[float, float]:
        """FLOP/s, without the time for the weights alone, which noise must not make the larger part."""
        return flops / max(forward - for_weights[0], forward / 2), 2 * flops / max(
            backward - for_weights[1], backward / 2
        )

    attention = [(length, *rate(f"attention {length}", *_attention_flops(length, sizes))) for length in LENGTHS]
    _, *middle = attention[1]
    product_flops = 3 * flops / (taken["linear", "forward"] + taken["linear", "backward"])
    peak = max(peak_flops, product_flops)
    norm, gelu = pair("norm", tokens * width, tokens * width), pair("gelu", tokens * wide, tokens * wide)
    residual = taken["residual", "call"] / (tokens * width)
    copied = 2 * 4 * parameters / taken["copy", "call"]
    # In widths of a token, forward and backward: a norm reads and writes 2 + 3, a sum 3 + 2, and a GELU 2 + 3 of four widths.
    streamed = itemsize * (2 * 5 + 2 * 5 + 4 * 5) / (2 * sum(norm) + 4 * residual + 4 * sum(gelu))
    linear = f"a linear layer with its bias, {tokens:,} x {width:,} by {width:,} x {wide:,}"
    causal = f"causal attention, heads of {HEAD}"
    return {
        "": {
            "flops": MeasuredConstant(peak, "A square product: the best of 20."),
            "memory_bandwidth": MeasuredConstant(copied, f"Copies of {parameters:,} fp32 numbers, which are read and written."),
            "launch_s": MeasuredConstant(taken["small", "call"], f"An addition to one number, {SMALL} in turn."),
        },
        "efficiency": {
            "product": MeasuredConstant(product_flops / peak, f"Forward and backward of {linear}."),
            "attention": MeasuredConstant(
                min(3.5 / (1 / middle[0] + 2.5 / middle[1]) / peak, 1.0), f"Forward and backward of {causal}, {LENGTHS[1]} tokens."
            ),
            # At most 1: what fits the cache may be faster than the memory.
            "stream": MeasuredConstant(min(streamed / copied, 1.0), "Two norms, two sums and a GELU of a block, forward and backward."),
        },
        "kernels": {
            "product_flops": MeasuredConstant(of_rows(taken["linear", "forward"], taken["linear", "backward"]), f"Of {linear}."),
            "cut_product_flops": MeasuredConstant(
                of_rows(taken["cut forward", "call"], taken["cut backward", "call"]),
                "The same of a layer that is cut over ranks or in a stage of a pipeline, without autograd.",
            ),
            "weight_s": MeasuredConstant(
                (for_weights[0] / weights, for_weights[1] / weights),
                f"From {linear.removeprefix('a ')}, and with {FEW_ROWS} rows: what does not depend on the rows, per weight.",
            ),
            "attention_flops": MeasuredConstant(
                tuple(attention), f"Of {causal}; (tokens, forward, backward); the masked half is not counted."
            ),
            "norm_s": MeasuredConstant(norm, f"A layer norm of {tokens:,} x {width:,}, per element."),
            "gelu_s": MeasuredConstant(gelu, f"GELU (tanh) of {tokens:,} x {wide:,}, per element."),
            "residual_s": MeasuredConstant(residual, f"A sum of {tokens:,} x {width:,}, per element."),
            "loss_s": MeasuredConstant(
                pair("loss", tokens * CLASSES, tokens * CLASSES), f"Cross entropy of {tokens:,} x {CLASSES:,}, fp32, per logit."
            ),
            "operation_s": MeasuredConstant(pair("small with autograd", SMALL, SMALL), f"A sum of 8 numbers, {SMALL} in turn."),
            "update_s": MeasuredConstant(taken["update", "call"] / parameters, f"AdamW, fused, of {parameters:,} parameters."),
            "grad_norm_s": MeasuredConstant(taken["grad norm", "call"] / parameters, f"The norm of {parameters:,} gradients."),
            "add_s": MeasuredConstant(taken["add", "call"] / parameters, f"a += b of {parameters:,} fp32 numbers."),
        },
    }  # fmt: skip


def _fixed(few: tuple[float, float], many: tuple[float, float]) -> float:
    """The seconds for no rows, from (rows, seconds) of few and of many rows; at least 0, and at most half of those of many."""
    (few_rows, few_s), (rows, rows_s) = few, many
    return min(max(few_s - (rows_s - few_s) / (rows - few_rows) * few_rows, 0.0), rows_s / 2)


def _attention_shape(length: int, sizes: KernelSizes) -> tuple[int, int, int]:
    """Sequences, tokens of each, heads. Longer sequences have fewer heads, so the work is about the same."""
    heads = max(sizes.width // HEAD * LENGTHS[0] // length, 1)
    return max(sizes.tokens // length, 1), length, heads


def _attention_flops(length: int, sizes: KernelSizes) -> tuple[float, float]:
    """Forward and backward; the masked half is not counted."""
    sequences, tokens, heads = _attention_shape(length, sizes)
    flops = 2 * sequences * tokens * tokens * heads * HEAD
    return flops, 2.5 * flops


def _contestants(rig: Rig, sizes: KernelSizes) -> dict[str, Contestant]:
    tokens, width, parameters = sizes
    generator = torch.Generator(rig.device).manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = rig.dtype, grad: bool = True) -> torch.Tensor:
        values = torch.randn(*shape, device=rig.device, dtype=torch.float32, generator=generator)
        return values.to(dtype).requires_grad_(grad)

    x, weight, bias = drawn(tokens, width), drawn(4 * width, width), drawn(4 * width)
    x_, weight_, bias_, grad = (t.detach() for t in (x, weight, bias, drawn(tokens, 4 * width)))
    x_next = drawn(tokens, width, grad=False)
    targets = torch.randint(CLASSES, (tokens,), device=rig.device, generator=generator)
    one, few = torch.zeros(1, device=rig.device), torch.zeros(8, device=rig.device, requires_grad=True)
    a, b = (drawn(parameters, dtype=torch.float32, grad=False) for _ in range(2))

    def cut_backward() -> None:
        product(grad, weight_)
        product(grad.t(), x_)
        grad.sum(0)

    def small_with_autograd(z: torch.Tensor) -> torch.Tensor:
        for _ in range(SMALL):
            z = z + 1
        return z

    def queries(length: int) -> torch.Tensor:
        sequences, tokens, heads = _attention_shape(length, sizes)
        return drawn(sequences, tokens, 3, heads, HEAD)

    forward_backward = partial(ForwardBackward, rig)
    return {
        "linear": forward_backward(F.linear, (x, weight, bias)),
        "few rows": forward_backward(F.linear, (drawn(FEW_ROWS, width), weight, bias)),
        "cut forward": Calls(rig, lambda: product(x_, weight_.t(), bias_)),
        "cut backward": Calls(rig, cut_backward),
        **{f"attention {length}": forward_backward(_attention, (queries(length),)) for length in LENGTHS},
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
