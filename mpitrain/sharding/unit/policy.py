"""The dtypes of a sharded module, and the memory of its shards. The policies have the meaning of torch's policies of these names."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from collectives.arrays.dtypes import dtype_of, number_of


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a sharded module. The shards, which the optimizer updates, keep the dtype of the parameters: fp32 masters.

    The policy is for floating-point parameters. Complex parameters are used and reduced in their own dtype.

    `param_dtype`: dtype of the full parameters in forward and backward (None: the dtype of the shards).
    `reduce_dtype`: dtype in which gradients are reduced over ranks (None: `param_dtype`).
    `output_dtype`: dtype of the floating outputs of the module in the call of `fully_shard` (None: no cast).
    `cast_forward_inputs`: cast floating inputs of the module to `param_dtype`.
    `keep_fp32`: modules that still compute in fp32, given by the names of their classes or by patterns of their names within the
        module in the call of `fully_shard` (`("LayerNorm", "*.router")`). Their inputs are cast to fp32, their outputs to
        `param_dtype`. A name without a module in the whole model is an error, at the latest at the first forward.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype: Any = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(
                    f"MixedPrecisionPolicy: {name} is {dtype!r}; expected a floating dtype, such as torch.bfloat16"
                )
        if isinstance(self.keep_fp32, str) or not all(isinstance(name, str) for name in self.keep_fp32):
            raise TypeError(
                f"MixedPrecisionPolicy: keep_fp32 is {self.keep_fp32!r}; expected a tuple of names, such as ('LayerNorm',)"
            )
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if self.keep_fp32 and self.param_dtype is None:
            raise ValueError(
                "MixedPrecisionPolicy: keep_fp32 names modules that do not compute in param_dtype, but param_dtype is None; pass both"
            )

    def dtypes_of(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of full parameters and of reductions for parameters of `dtype`. TypeError if such gradients cannot be reduced.

        Complex parameters keep their dtype, and are reduced as pairs of real and imaginary parts.
        """
        if dtype.is_complex:
            dtype_of(dtype)  # raises TypeError for 32 bits
            return dtype, dtype
        full = (self.param_dtype if dtype.is_floating_point else None) or dtype
        reduced = self.reduce_dtype or full
        for each in (dtype, full, reduced):
            number_of(each)
        return full, reduced

    def of_kept(self) -> "MixedPrecisionPolicy":
        """The policy of a module that computes in fp32 within one that computes in `param_dtype`."""
        return MixedPrecisionPolicy(torch.float32, self.reduce_dtype, self.param_dtype)

    def keeps(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether a module of this name and class computes in fp32."""
        return any(names(pattern, name, kind) for pattern in self.keep_fp32)


def names(pattern: str, name: str, kind: type[nn.Module]) -> bool:
    """Whether a pattern of `keep_fp32` names a module of this name and class."""
    return pattern == kind.__name__ or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class CPUOffloadPolicy:
    """Keep shards, their gradients and so the optimizer's state in host memory. A unit's full parameters are copied to the GPU for use.

    The optimizer's step runs on the host (use `fused=True`). No effect for parameters on CPUs. `pin_memory`: use pinned pages, so that
    copies overlap with the computation. Pinned memory cannot be swapped out or used by other processes.
    """

    pin_memory: bool = True

    def parts(self, device: torch.device) -> bool:
        """Whether the shards of full parameters on `device` are in other memory."""
        return device.type != "cpu"
