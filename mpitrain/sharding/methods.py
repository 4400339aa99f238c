"""Methods of the modules of a sharded model: those that compute with full parameters, as its forward does, and those of other libraries
that would be wrong on shards.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.sharding.module import ShardedModule, call_module, outermost
from mpitrain.sharding.unit.unit import around_of, unit_of


def register_forward_method(module: nn.Module, *names: str) -> None:
    """Let methods of a sharded model compute with full parameters: each call of them is a forward, as `model(x)` is.

    `module`: a model after `fully_shard`, a part of one, or a model with several sharded parts; on a model without sharded parts the
    call has no effect. `names`: methods such as "encode" or "training_step"; "forward" of a part lets it be called alone.
    A call of such a method fills the full parameters of the module's own unit, and blocks in it gather theirs when they run. So private
    storage needs no more memory than for `model(x)`. Like `model(x)` the method is collective: all ranks call it, and in private
    storage they run the same blocks in the same order. torch's `register_fsdp_forward_method` does the same for FSDP2.

    `generate` of models of transformers and peft is registered by `fully_shard`, and computes no gradients.

    Raises:
        ValueError: the module has no such method, or the method is a generator or a coroutine, which would run after its call.
    """
    for name in names:
        method = getattr(module, name, None)
        if not callable(method) or isinstance(method, nn.Module):
            found = "is a module; register methods of it" if isinstance(method, nn.Module) else "is no method of it"
            raise ValueError(
                f"register_forward_method: expected names of methods of this {type(module).__name__}; {name!r} {found}"
            )
        if any(
            is_kind(method)
            for is_kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        ):
            raise ValueError(
                f"register_forward_method: {name!r} is a generator or a coroutine, which computes after its call has returned; call it "
                "within `with mpitrain.unshard(model):`"
            )
        _register(module, name, method)


def register_generate(module: nn.Module) -> None:
    """Register `generate` of a module and its parts if they are models of transformers or peft."""
    for part in module.modules():
        if any(
            "generate" in vars(kind) and kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(part).__mro__
        ):
            _register(part, "generate", part.generate, no_grad=True)  # type: ignore[arg-type]


_LIBRARIES = ("transformers", "peft")


def _register(module: nn.Module, name: str, method: Callable[..., Any], *, no_grad: bool = False) -> None:
    around = around_of(module)
    entry: nn.Module | None = module
    owners: list[ShardedModule]
    if isinstance(module, ShardedModule):
        owners = [module]
    elif isinstance(around, ShardedModule):
        owners = [around]
    else:
        entry, owners = None, list(outermost(module))
    if not owners or getattr(method, "is_registered", False):
        return
    if name == "forward" and isinstance(module, ShardedModule):
        module._is_entry = True
        return
    guards = owners[0]._unit.guards
    if name == "forward" and guards is not None and guards.has(module):
        guards.entries.add(module)
        return

    @functools.wraps(method)
    def registered(*args: Any, **kwargs: Any) -> Any:
        call = method
        for owner in reversed(owners):
            call = functools.partial(_run, owner, owner if entry is None else entry, call)
        with torch.no_grad() if no_grad else nullcontext():
            return call(*args, **kwargs)

    registered.is_registered = True  # type: ignore[attr-defined]
    setattr(module, name, registered)


def _run(owner: ShardedModule, entry: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return call_module(owner, method, args, kwargs, entry=entry)


# Methods of other libraries, and of torch

_BEFORE = "call it before fully_shard"
_MERGE = (
    "write the adapter, by save_pretrained on rank 0 while all ranks are within `with mpitrain.unshard(model):`, and merge it into an "
    "unsharded model"
)
_REMEDIES = {
    "resize_token_embeddings": _BEFORE,  # of transformers; it puts new parameters into the model
    "merge_and_unload": _MERGE,  # the last three are of peft, and write to parameters
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
}


def refuse_methods(module: nn.Module, *, is_cut: bool) -> None:
    """Let methods that replace parameters raise TypeError in all parts of a module; with `is_cut`, also methods that write to them."""
    for path, part in module.named_modules():
        for method, remedy in _REMEDIES.items():
            if not callable(getattr(type(part), method, None)) or (remedy is _MERGE and not is_cut):
                continue
            param = next((name for name, _ in part.named_parameters(path)), None)
            if param is not None:
                text = f"{method}: {param} is sharded, and each rank has only its own rows; {remedy}"
                setattr(part, method, functools.partial(_refuse, text))


def _refuse(text: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(text)


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
