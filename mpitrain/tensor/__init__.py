"""Tensor parallelism (Megatron-LM: Shoeybi et al., 1909.08053) and sequence parallelism (Korthikanti et al., 2205.05198).

`tensor_parallel` cuts the matrices of a plain model over ranks, in place, as a plan says (plan.py). A *region* is a module whose
matrices are cut: whole sequences enter it, each rank computes with its features, and a sum over the ranks leaves it. Between regions
each rank has all features: of all tokens, or, with sequence parallelism, of its own tokens.
"""

from mpitrain.tensor.api import tensor_parallel
from mpitrain.tensor.layers import communication_s
from mpitrain.tensor.plan import Plan, Style
from mpitrain.tensor.vocabulary import cross_entropy

__all__ = ["Plan", "Style", "communication_s", "cross_entropy", "tensor_parallel"]
