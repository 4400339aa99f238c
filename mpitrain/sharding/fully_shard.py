"""The public face of sharding: `fully_shard`, which keeps the meaning of torch's function of that name.

ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020) cuts the optimizer's state
over the ranks in stage 1, gradients too in stage 2, parameters too in stage 3. The cut by flat units, and that of a hybrid of shards
and copies, follow torch's FSDP (Zhao et al., VLDB 2023).
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from collectives import Communicator, Mesh
from mpitrain.sharding.blocks import stacked_blocks
from mpitrain.sharding.context import Context
from mpitrain.sharding.layout import Layout
from mpitrain.sharding.optimizers import watch_optimizers
from mpitrain.sharding.policy import MixedPrecisionPolicy
from mpitrain.sharding.ranks import Ranks, ranks_of
from mpitrain.sharding.state import State
from mpitrain.sharding.storage import Gathered, Kept, Resident, Storage
from mpitrain.sharding.tree import Tree
from mpitrain.sharding.unit import Sharded, Unit

_log = logging.getLogger("mpitrain")


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module: its class becomes a subclass of this and of what it was."""

    _sharding: State

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with full parameters in place."""
        return self._sharding.forward(super().__call__, args, kwargs, context_of(self))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; the shards, but within forward and backward."""
        self._sharding.tidy()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: the shards."""
        self._sharding.tidy()
        return super().state_dict(*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients over the ranks. Without, each rank keeps its full gradients, which takes as much memory
        as the unsharded model's, and the next backward with it reduces the sum."""
        for state in states_of(self) if recurse else [self._sharding]:
            state.sync_gradients = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the block reduce nothing: see `set_requires_gradient_sync`."""
        before = [(state, state.sync_gradients) for state in states_of(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, synced in before:
                state.sync_gradients = synced

    def unshard(self) -> None:
        """Fill and show the full parameters of this module (not of modules sharded within it). Collective."""
        self._sharding.unshard()

    def reshard(self) -> None:
        """Show the shards again and give the memory back."""
        self._sharding.reshard()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `double`, `cuda` and the like end here. The full parameters would not follow the shards."""
        for param in self.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise TypeError(
                    f"a sharded model cannot be cast or moved (here from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device}); do so before fully_shard, or compute in another dtype by mp_policy"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a sharded model cannot be copied; copy it before fully_shard, or save it and load the copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sharded model cannot be pickled; use mpitrain.save, or pickle mpitrain.full_state_dict(model)"
        )


def fully_shard(
    module: nn.Module,
    mesh: Mesh | Communicator | None = None,
    *,
    stage: int = 3,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    units: Literal["auto", "one"] = "auto",
    storage: Literal["auto", "resident", "private"] = "auto",
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
            keeps them.
        mp_policy: dtypes; None: all as the parameters are.
        offload_policy: None, the only one so far.
        ignored_params: left as they are, on every rank.
        units: what is gathered, used and reduced at a time. "auto": where no part of the module is sharded yet, each block of its
            stacks (the layers of a transformer; not what is called experts) first, then the rest. "one": all of it. In private
            storage all ranks must run the same units in the same order; differences within a unit are free.
        storage: where full parameters live. "resident": once in the memory of each node, which its ranks share; from stage 1 on.
            "private": of each rank its own, in stage 3 gathered before use and freed after it. "auto": resident for parameters on
            CPUs, as long as the memory of all nodes suffices, else private.
        device: of parameters that are on the meta device; None: the CPU.

    Raises:
        ValueError: an argument that is not available, a module that is sharded already, tied weights across units.
        OSError: on all ranks, if the node's shared memory is full and "resident" was asked for.
    """
    watch_optimizers()
    _check_arguments(module, stage, reshard_after_forward, offload_policy, storage, units)
    ignored_params = list(ignored_params or ())
    if units == "auto" and not states_of(module):
        for block in stacked_blocks(module):
            fully_shard(
                block, mesh, stage=stage, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy,
                ignored_params=ignored_params, units="one", storage=storage, device=device,
            )  # fmt: skip
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None:
        for name, part in list(module.named_modules()):
            left = any(not hasattr(param, "shard_box") for param in part.parameters())
            if part is not module and left and not isinstance(part, ShardedModule) and policy.keeps(name, part):
                fully_shard(
                    part, mesh, stage=stage, reshard_after_forward=reshard_after_forward, mp_policy=policy.of_kept(),
                    ignored_params=ignored_params, units="one", storage=storage, device=device,
                )  # fmt: skip
    ranks = ranks_of(mesh, whole=stage == 0)
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
        made.append(Unit(params, ranks, policy, where, _storage(ranks, where, stage, storage)))
    state = State(ranks, made, policy, stage=stage, reshard_after_forward=reshard_after_forward)
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    module._sharding = state  # type: ignore[assignment]
    return module


def _storage(ranks: Ranks, device: torch.device, stage: int, asked: str) -> Callable[[Layout, torch.dtype], Storage]:
    """What makes the Storage of a unit's full parameters."""
    private = Gathered if stage == 3 and ranks.shard.size > 1 else Kept

    def make(layout: Layout, dtype: torch.dtype) -> Storage:
        if asked == "private" or stage == 0 or device.type != "cpu":
            return private(layout, ranks.shard, dtype, device)
        resident = None
        try:
            resident = Resident(layout, ranks.shard, dtype, device)
        except OSError as error:
            if asked == "resident":
                raise
            _log.info("full parameters are private from here on: %s", error)
        if (
            all(ranks.all.all_gather_object(resident is not None)) and resident is not None
        ):  # each node knows of itself alone
            return resident
        return private(layout, ranks.shard, dtype, device)

    return make


def sharded_params(model: nn.Module) -> Iterator[Sharded]:
    """Every sharded parameter of a model, in the order of its modules."""
    for state in states_of(model):
        for unit in state.units:
            yield from unit.params


def sharded_over(model: nn.Module) -> Ranks | None:
    """The ranks a model is sharded over; None if it is not sharded."""
    states = states_of(model)
    return states[0].ranks if states else None


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank's forwards and backwards have spent in communication, waiting for other ranks included."""
    contexts = {id(state.context): state.context for state in states_of(model) if state.context is not None}
    return sum(context.comm_s for context in contexts.values())


def outermost(model: nn.Module) -> Iterator[ShardedModule]:
    """The sharded modules of a model that are within no other one."""
    if isinstance(model, ShardedModule):
        yield model
    else:
        for child in model.children():
            yield from outermost(child)


def states_of(model: nn.Module) -> list[State]:
    """The states of all sharded modules of a model."""
    return [module._sharding for module in model.modules() if isinstance(module, ShardedModule)]


def _check_arguments(
    module: nn.Module, stage: int, reshard_after_forward: Any, offload_policy: Any, storage: str, units: str
) -> None:
    if isinstance(module, ShardedModule):
        raise ValueError(f"fully_shard: this {type(module).__name__} is sharded already")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"fully_shard: stage is {stage!r}; expected 0, 1, 2 or 3")
    if stage == 0 and storage == "resident":
        raise ValueError(
            "fully_shard: in stage 0 each rank has a copy of its own; pass storage='auto', or stage 1 to 3"
        )
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; expected True or False")
    if offload_policy is not None:
        raise ValueError("fully_shard: offload_policy is not available yet; leave it None")
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


@torch.no_grad()
def _broadcast_buffers(module: nn.Module, comm: Communicator) -> None:
    """Let all ranks begin with rank 0's buffers, as torch's DistributedDataParallel does."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            values = buffer.detach().contiguous()
            try:
                comm.broadcast(torch.view_as_real(values) if values.is_complex() else values)
            except TypeError as error:
                raise TypeError(f"buffer {prefix}.{name}: {error}") from error
            if values.data_ptr() != buffer.data_ptr():
                owner._buffers[name] = values  # an expanded buffer cannot be written to


def context_of(module: "ShardedModule") -> Context:
    """The context of a module; made at the first forward, by the outermost module. Collective then."""
    state = module._sharding
    if state.context is None:
        states = states_of(module)
        if any(other.context is not None for other in states):
            raise RuntimeError(
                f"a part of this {type(module).__name__} was run alone before the whole; call the whole model first"
            )
        tree = Tree(module)
        # What is allocated now outlives this forward, which may be one of an evaluation in inference mode.
        with torch.inference_mode(False):
            _broadcast_buffers(module, state.ranks.all)
            Context(states, state.ranks, tree)
    assert state.context is not None
    return state.context
