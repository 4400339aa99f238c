"""Checks before an optimizer's step: its parameters are the model's, and a step on this rank's parts is correct for the whole.

An optimizer whose class has the attribute `handles_shards = True` looks at whole parameters by itself, as those of `mpitrain.optim` do.
"""

import functools
import warnings
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives import Communicator, launched_rank
from mpitrain.optim.elementwise import WholeVectors
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import first_cut, replaced, spread_of
from mpitrain.torch_glue.torch_internals import keep_compiler_out, not_compiled

# Optimizers, by name because most are in other packages, that take norms, means or products of a whole matrix or of all parameters.
NOT_ELEMENTWISE = (
    *("Adafactor", "AdamMini", "Adam_mini", "AdamP", "CAME", "DAdapt*", "Dion", "DistributedShampoo", "DoG", "FusedLAMB"),
    *("FusedNovoGrad", "GaLore*", "KFAC", "LAMB", "LARC", "LARS", "LBFGS", "LDoG", "Lamb", "Lars", "Muon", "NovoGrad"),
    *("Prodigy*", "SAM", "SGDP", "SM3", "SOAP", "Scion", "Shampoo"),
)  # fmt: skip

# Element-wise optimizers: classes of torch, and names of classes of other packages. Derived classes count as element-wise, too.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SparseAdam,
)  # fmt: skip
ELEMENTWISE_NAMES = frozenset(
    {"AdEMAMix", "AdaBelief", "AdamWScheduleFree", "DeepSpeedCPUAdam", "FusedAdam", "FusedSGD", "Lion"}
)

OURS = {
    "Muon": "Muon", "LAMB": "LAMB", "Lamb": "LAMB", "FusedLAMB": "LAMB", "LARS": "LARS", "Lars": "LARS", "LARC": "LARS",
}  # fmt: skip
"""The optimizers of `mpitrain.optim` that do on parts what other packages' optimizers of these names do on whole parameters."""


@functools.cache
def watch_optimizers() -> None:
    """Check every optimizer before each of its steps from now on."""
    register_optimizer_step_pre_hook(_check)


@not_compiled
def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    keep_compiler_out()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if (found := replaced(param)) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds {found.name} from before {found.by}, so it would train nothing; "
                f"make the optimizer after {found.by}, from model.parameters()"
            )
    _check_order(optimizer, params)
    cut = first_cut(params)
    if cut is not None and not getattr(optimizer, "handles_shards", False):
        _check_kind(optimizer, cut)


def _check_order(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """TypeError if an element's bits would depend on the cut into shards, where they must not [Note: whole vectors]."""
    kind = type(optimizer).__name__
    is_fused = not isinstance(optimizer, WholeVectors) and any(group.get("fused") for group in optimizer.param_groups)
    for param in params:
        is_short = param.dtype in (torch.bfloat16, torch.float16)
        if not (is_fused or is_short) or param.device.type != "cpu":
            continue
        if (spread := spread_of(param)) is None or not spread.is_ordered:
            continue
        if is_short:
            raise TypeError(
                f"{kind} would update shards in {param.dtype}, and CPUs round these by their place in the shard, so the bits would "
                "depend on the number of ranks; with slices make the model in float32, and pass "
                f"mp_policy=mpitrain.MixedPrecisionPolicy(param_dtype={param.dtype}) to fully_shard"
            )
        ours = f", or mpitrain.optim.{kind}" if kind in ("AdamW", "SGD") else ""
        raise TypeError(
            f"{kind}(fused=True) rounds the last elements of a shard in another way than the others, so the bits would depend on the "
            f"number of ranks; with slices use foreach=True{ours}"
        )


def _check_kind(optimizer: torch.optim.Optimizer, cut: torch.Tensor) -> None:
    """TypeError for an optimizer that needs more than this rank's part, `cut`. A warning, once, for an optimizer that is not known."""
    kind, spread = type(optimizer), spread_of(cut)
    assert spread is not None
    stated = getattr(optimizer, "is_elementwise", None)
    is_elementwise = _known(kind.__mro__) if stated is None else bool(stated)
    if is_elementwise is False:
        ours = next((f"mpitrain.optim.{OURS[base.__name__]}, " for base in kind.__mro__ if base.__name__ in OURS), "")
        raise TypeError(
            f"{kind.__name__} needs whole matrices, or all parameters at once, but {spread.name} is cut: this rank holds "
            f"{tuple(cut.shape)} of a parameter of shape {spread.full_shape}; use {ours}an element-wise optimizer (SGD, Adam, AdamW), "
            "or stage=0 without tensor parallelism"
        )
    if is_elementwise is None:
        _warn_of(kind.__name__)


@functools.cache  # once
def _warn_of(kind: str) -> None:
    if launched_rank() <= 0:
        warnings.warn(
            f"each rank updates only its own part of the parameters: if {kind} takes norms, means or products of whole "
            f"matrices, or of all parameters, its steps are wrong; if it is element-wise, set {kind}.is_elementwise "
            "= True (False makes it an error)",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache  # at each step of an optimizer
def _known(kinds: tuple[type, ...]) -> bool | None:
    """Whether an optimizer whose class has these bases is element-wise; None if the lists have none of the bases."""
    names = [kind.__name__ for kind in kinds]
    if any(fnmatchcase(name, pattern) for name in names for pattern in NOT_ELEMENTWISE):
        return False
    if any(kind in ELEMENTWISE for kind in kinds) or ELEMENTWISE_NAMES.intersection(names):
        return True
    return None


def check_ranks(optimizer: torch.optim.Optimizer, checked: list[int] | None) -> list[int]:
    """The ids of the parameters. If they are not the `checked` ones, the ranks that hold parts of the parameters compare their calls.

    ValueError on all ranks, with the first difference, if they pass other parameters, another order, or other settings. Learning rates
    may differ for a time: schedulers change them. Collective if the ids are new, and then 16 bytes per rank.
    """
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if ids == checked:
        return ids
    lines: dict[Communicator, list[str]] = {}
    for number, group in enumerate(optimizer.param_groups):
        settings = ", ".join(f"{name} {group[name]}" for name in optimizer.defaults if name in group and name != "lr")
        begun: set[Communicator] = set()
        for param in group["params"]:
            if (spread := spread_of(param)) is None:
                continue
            its = lines.setdefault(spread.alike, [])
            if spread.alike not in begun:
                its.append(f"group {number} with {settings}")
                begun.add(spread.alike)
            its.append(f"{spread.name} of shape {spread.full_shape}")
    for comm, its in lines.items():
        check_alike(
            comm, its, caller=type(optimizer).__name__,
            remedy="pass the same parameters in the same order, with the same settings, on all ranks",
        )  # fmt: skip
    return ids
