"""torch's fast path of `nn.TransformerEncoderLayer`, which computes with the parameters of its parts without calling the parts."""

from torch import nn

from mpitrain.sharding.unit.registry import unit_of


def leave_fast_path(module: nn.Module) -> None:
    """Let encoder layers in `module` call those of their parts that are units of their own, in evaluation without gradients too.

    Only in the call of such a part are its parameters full (private storage in stage 3), and only there do inputs get the dtype of
    `keep_fp32`. Other layers keep the fast path.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            unit_of(part) is not None for part in layer.modules() if part is not layer
        ):
            layer.activation_relu_or_gelu = 0  # a condition of the fast path; torch reads it for nothing else
