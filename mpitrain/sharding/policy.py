"""How a sharded module computes and reduces; the meaning is that of torch's `MixedPrecisionPolicy`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a sharded module. The shards, which the optimizer steps, keep the dtype the parameters had: fp32 masters.

    `param_dtype`: of the full parameters in forward and backward (None: as the shards).
    `reduce_dtype`: in which gradients are reduced over ranks (None: `param_dtype`).
    `output_dtype`: floating outputs of the module are cast to it (None: left as they are).
    `cast_forward_inputs`: cast floating inputs of the module to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
