"""The public face of sharding: `fully_shard`, which keeps the meaning of torch's function of that name.

ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020) cuts the optimizer's state
over the ranks in stage 1, gradients too in stage 2, parameters too in stage 3. The cut by flat units, and that of a hybrid of shards
and copies, follow torch's FSDP (Zhao et al., VLDB 2023).
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from collectives import Communicator, Mesh
from mpitrain.heap import keep_freed_memory
from mpitrain.sharding.blocks import stacked_blocks
from mpitrain.sharding.layout import Layout
from mpitrain.sharding.module import ShardedModule, states_of
from mpitrain.sharding.optimizers import watch_optimizers
from mpitrain.sharding.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.ranks import Ranks, group_of, ranks_of
from mpitrain.sharding.state import State
from mpitrain.sharding.storage import Gathered, Kept, Resident, Storage
from mpitrain.sharding.unit import Unit

_log = logging.getLogger("mpitrain")


def fully_shard(
    module: nn.Module,
    mesh: Mesh | Communicator | None = None,
    *,
    stage: int = 3,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    units: Literal["auto", "one"] = "auto",
    storage: Literal["auto", "resident", "private"] = "auto",
    prefetch_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that are in no unit yet over the ranks of `mesh`, in place; returns it.

    Apply it to the blocks first, then to the whole, then make the optimizer: `model.parameters()` are the shards from now on, of
    the same order and number on all ranks. Applied to the whole alone it takes the blocks itself. Collective. Parameters take the
    values of rank 0; on the meta device they are allocated, and given values by `mpitrain.initialize` or a checkpoint.

    Args:
        mesh: a Communicator, or a Mesh: shards along its axis `dp_shard`, copies of them along `dp_replicate`; None:
            `collectives.world()`. All parts of a model take the same.
        stage: what is cut over the ranks of `dp_shard`. 0: nothing, each rank has a copy of the model, gradients are averaged during
            the backward (as torch's DistributedDataParallel does); 1: the optimizer's state; 2: gradients too; 3: parameters too.
        reshard_after_forward: in stage 3 give private full parameters back after forward and gather them again for backward; False
            keeps them. A number: between forward and backward so many neighbouring ranks, those of a node for instance, hold them
            together, and gather them for backward among themselves. It divides the ranks that hold the shards; 1 is False, all True.
        mp_policy: dtypes; None: all as the parameters are.
        offload_policy: `CPUOffloadPolicy()` keeps shards and the optimizer's state of parameters on GPUs in host memory.
        ignored_params: left as they are, on every rank.
        units: what is gathered, used and reduced at a time. "auto": where no part of the module is sharded yet, each block of its
            stacks (the layers of a transformer; not what is called experts) first, then the rest. "one": all of it. In private
            storage all ranks must run the same units in the same order; differences within a unit are free.
        storage: where full parameters live. "resident": once in the memory of each node, which its ranks share; from stage 1 on.
            "private": of each rank its own, in stage 3 gathered before use and freed after it. "auto": resident for parameters on
            CPUs, as long as the memory of all nodes suffices, else private.
        prefetch_bytes: private full parameters of stage 3 that may be gathered ahead of their use, in the order of the step before,
            where that goes on while the rank computes: with a progress thread, or by NCCL. None: as many bytes as the longest part
            sharded within this module has; 0: none. That of the outermost module counts.
        device: of parameters that are on the meta device; None: the CPU.

    Raises:
        ValueError: an argument that is not available, a module that is sharded already, tied weights across units.
        OSError: on all ranks, if the node's shared memory is full and "resident" was asked for.
    """
    watch_optimizers()
    _check_arguments(module, stage, offload_policy, storage, units, prefetch_bytes)
    ranks = ranks_of(mesh, whole=stage == 0)
    reshards, num_group = _resharding(reshard_after_forward, ranks.shard.size if stage == 3 else None)
    ignored_params = list(ignored_params or ())
    shard_part = partial(
        fully_shard, mesh=mesh, stage=stage, reshard_after_forward=reshard_after_forward, ignored_params=ignored_params,
        units="one", storage=storage, offload_policy=offload_policy, prefetch_bytes=prefetch_bytes, device=device,
    )  # fmt: skip
    if units == "auto" and not states_of(module):
        for block in stacked_blocks(module):
            shard_part(block, mp_policy=mp_policy)
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None:
        for name, part in list(module.named_modules()):
            left = any(not hasattr(param, "shard_box") for param in part.parameters())
            if part is not module and left and not isinstance(part, ShardedModule) and policy.keeps(name, part):
                shard_part(part, mp_policy=policy.of_kept())
    ignored = {id(param) for param in ignored_params}
    made = []
    for params in _groups(module, ignored):
        where = params[0][2].device
        if where.type == "meta":
            where = torch.device(device or "cpu")
        if storage == "resident" and where.type != "cpu":
            raise ValueError(
                f"storage='resident' needs parameters on the CPU; these are on {where}; use storage='auto'"
            )
        if where.type == "cpu":
            keep_freed_memory()
        made.append(
            Unit(params, ranks, policy, where, _storage(ranks, where, stage, storage, num_group), offload_policy)
        )
    state = State(ranks, made, policy, stage=stage, reshard_after_forward=reshards, prefetch_bytes=prefetch_bytes)
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    module._sharding = state  # type: ignore[assignment]
    return module


def _storage(
    ranks: Ranks, device: torch.device, stage: int, asked: str, num_group: int | None
) -> Callable[[Layout, torch.dtype], Storage]:
    """What makes the Storage of a unit's full parameters. `num_group`: ranks that hold gathered ones between forward and backward."""

    def private(layout: Layout, dtype: torch.dtype) -> Storage:
        if stage < 3 or ranks.shard.size == 1:
            return Kept(layout, ranks.shard, dtype, device)
        group = None if num_group is None else group_of(ranks.shard, num_group)
        return Gathered(layout, ranks.shard, dtype, device, group)

    def make(layout: Layout, dtype: torch.dtype) -> Storage:
        if asked == "private" or stage == 0 or device.type != "cpu":
            return private(layout, dtype)
        resident = None
        try:
            resident = Resident(layout, ranks.shard, dtype, device)
        except OSError as error:
            if asked == "resident":
                raise
            _log.info("full parameters are private from here on: %s", error)
        everywhere = all(ranks.all.all_gather_object(resident is not None))  # each node knows of itself alone
        return resident if everywhere and resident is not None else private(layout, dtype)

    return make


def _resharding(asked: Any, size: int | None) -> tuple[bool, int | None]:
    """Whether full parameters are given back after forward, and to how many ranks if not to all `size` that hold shards.

    torch's meaning. `size`: None where full parameters are never given back.
    """
    if isinstance(asked, bool):
        return asked, None
    if not isinstance(asked, int) or asked < 1:
        raise ValueError(
            f"fully_shard: reshard_after_forward is {asked!r}; expected True, False, or a number of ranks from 1"
        )
    if size is None or asked == 1:
        return asked != 1, None
    if size % asked:
        factors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"fully_shard: reshard_after_forward is {asked}, which does not divide the {size} ranks that hold the shards; expected one "
            f"of {factors}, or True or False"
        )
    return True, None if asked == size else asked


def _check_arguments(
    module: nn.Module, stage: int, offload_policy: Any, storage: str, units: str, prefetch_bytes: Any
) -> None:
    if isinstance(module, ShardedModule):
        raise ValueError(f"fully_shard: this {type(module).__name__} is sharded already")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"fully_shard: stage is {stage!r}; expected 0, 1, 2 or 3")
    if stage == 0 and storage == "resident":
        raise ValueError(
            "fully_shard: in stage 0 each rank has a copy of its own; pass storage='auto', or stage 1 to 3"
        )
    if prefetch_bytes is not None and (type(prefetch_bytes) is not int or prefetch_bytes < 0):
        raise ValueError(
            f"fully_shard: prefetch_bytes is {prefetch_bytes!r}; expected a number of bytes from 0, or None"
        )
    if not isinstance(offload_policy, CPUOffloadPolicy | None):
        raise ValueError(f"fully_shard: offload_policy is {offload_policy!r}; expected CPUOffloadPolicy() or None")
    if storage not in ("auto", "resident", "private"):
        raise ValueError(f"fully_shard: storage is {storage!r}; expected 'auto', 'resident' or 'private'")
    if units not in ("auto", "one"):
        raise ValueError(f"fully_shard: units is {units!r}; expected 'auto' or 'one'")


def _groups(module: nn.Module, ignored: set[int]) -> list[list[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]]]:
    """The parameters in no unit yet, each with all its users, grouped by dtype, requires_grad and device: a unit each."""
    inside = {id(m) for child in module.modules() if isinstance(child, ShardedModule) for m in child.modules()}
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is None or hasattr(param, "shard_box") or hasattr(param, "_ignored_by_sharding"):
                continue
            if id(param) in ignored:
                param._ignored_by_sharding = True  # by the units around this one, too
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if hasattr(param, "_sharded_as") or id(owner) in inside:
                raise ValueError(
                    f"fully_shard: {full_name} is tied to, or was added to, a unit that exists already "
                    f"({getattr(param, '_sharded_as', 'a sharded module')}); "
                    "apply fully_shard to the lowest module that contains all users of a parameter, and to none of them alone"
                )
            users.setdefault(id(param), []).append((owner, name))
            found.setdefault(id(param), (full_name, param))
    groups: dict[
        tuple[torch.dtype, bool, torch.device], list[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]]
    ] = {}
    for key, (name, param) in found.items():
        groups.setdefault((param.dtype, param.requires_grad, param.device), []).append((name, users[key], param))
        param._sharded_as = name  # type: ignore[attr-defined]
    return list(groups.values())
