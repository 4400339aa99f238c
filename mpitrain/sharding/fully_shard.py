"""The public face of sharding: `fully_shard`, which keeps the meaning of torch's function of that name.

ZeRO stage 3 (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020): parameters,
gradients and optimizer state are each cut over the ranks. The cut by flat units follows torch's FSDP (Zhao et al., VLDB 2023).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

import collectives
from collectives import Communicator, Mesh
from mpitrain.sharding.context import Context
from mpitrain.sharding.policy import MixedPrecisionPolicy
from mpitrain.sharding.state import State
from mpitrain.sharding.unit import Sharded, Unit

Storage = Literal["auto", "resident", "private"]


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module: its class becomes a subclass of this and of what it was."""

    _sharding: State

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with full parameters in place."""
        return self._sharding.forward(super().__call__, args, kwargs, _context(self))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients over the ranks. Without, each rank keeps its full gradients, which takes as much memory
        as the unsharded model's, and the next backward with it reduces the sum."""
        for state in _states(self) if recurse else [self._sharding]:
            state.sync_gradients = requires_gradient_sync

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
    storage: Storage = "auto",
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that are in no unit yet over the ranks of `mesh`, in place; returns it.

    Apply it to the blocks first, then to the whole, then make the optimizer: `model.parameters()` are the shards from now on, of the
    same order and number on all ranks. Collective. Parameters take the values of rank 0; on the meta device they are
    allocated, and given values by `mpitrain.initialize` or a checkpoint.

    Args:
        mesh: a Communicator, or a Mesh whose axis `dp_shard` is taken; None: `collectives.world()`.
        stage: 3, the only one so far.
        reshard_after_forward: give private full parameters back after forward and gather them again for backward; False keeps them.
        mp_policy: dtypes; None: all as the parameters are.
        offload_policy: None, the only one so far.
        ignored_params: left as they are, on every rank.
        storage: where full parameters live. "resident": once in the memory of the node, which all its ranks share. "private":
            gathered for each rank, freed after use. "auto": resident on the CPUs of one node, else private.
        device: of parameters that are on the meta device; None: the CPU.

    Raises:
        ValueError: an argument that is not available, a module that is sharded already, tied weights across units.
        OSError: on all ranks, if the node's shared memory is full.
    """
    comm = _communicator(mesh)
    _check_arguments(module, stage, reshard_after_forward, offload_policy, storage)
    policy = mp_policy or MixedPrecisionPolicy()
    ignored = {id(param) for param in ignored_params or ()}
    units = []
    for params in _groups(module, ignored):
        where = params[0][2].device
        if where.type == "meta":
            where = torch.device(device or "cpu")
        one_node_cpu = where.type == "cpu" and comm.num_nodes == 1
        if storage == "resident" and not one_node_cpu:
            raise ValueError(
                f"storage='resident' needs parameters on the CPUs of one node; these are on {where}, "
                f"the ranks on {comm.num_nodes} nodes; use storage='auto'"
            )
        units.append(Unit(params, comm, policy, where, resident=one_node_cpu and storage != "private"))
    state = State(comm, units, policy, reshard_after_forward=reshard_after_forward)
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    module._sharding = state  # type: ignore[assignment]
    return module


def sharded_params(model: nn.Module) -> Iterator[Sharded]:
    """Every sharded parameter of a model, in the order of its modules."""
    for state in _states(model):
        for unit in state.units:
            yield from unit.params


def communicator(model: nn.Module) -> Communicator | None:
    """The ranks a model is sharded over; None if it is not sharded."""
    states = _states(model)
    return states[0].comm if states else None


def communication_s(model: nn.Module) -> float:
    """Seconds that this rank's forwards and backwards have spent in communication, waiting for other ranks included."""
    contexts = {id(state.context): state.context for state in _states(model) if state.context is not None}
    return sum(context.comm_s for context in contexts.values())


def _states(model: nn.Module) -> list[State]:
    return [module._sharding for module in model.modules() if isinstance(module, ShardedModule)]


def _communicator(mesh: Mesh | Communicator | None) -> Communicator:
    if mesh is None:
        return collectives.world()
    if isinstance(mesh, Communicator):
        return mesh
    others = [f"{name}={size}" for name, size in mesh.axes.items() if size > 1 and name != "dp_shard"]
    if others:
        raise ValueError(
            f"fully_shard: mesh axes {', '.join(others)} are not available yet; only dp_shard may be longer than 1"
        )
    return mesh["dp_shard"]


def _check_arguments(
    module: nn.Module, stage: int, reshard_after_forward: Any, offload_policy: Any, storage: str
) -> None:
    if isinstance(module, ShardedModule):
        raise ValueError(f"fully_shard: this {type(module).__name__} is sharded already")
    if stage != 3:
        raise ValueError(f"fully_shard: stage {stage} is not available; only 3 is so far")
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; expected True or False")
    if offload_policy is not None:
        raise ValueError("fully_shard: offload_policy is not available yet; leave it None")
    if storage not in ("auto", "resident", "private"):
        raise ValueError(f"fully_shard: storage is {storage!r}; expected 'auto', 'resident' or 'private'")


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


def _context(module: "ShardedModule") -> Context:
    """The context of a module; made at the first forward, by the outermost module. Collective then."""
    state = module._sharding
    if state.context is None:
        states = _states(module)
        if any(other.context is not None for other in states):
            raise RuntimeError(
                f"a part of this {type(module).__name__} was run alone before the whole; call the whole model first"
            )
        # What is allocated now outlives this forward, which may be one of an evaluation in inference mode.
        with torch.inference_mode(False):
            _broadcast_buffers(module, state.comm)
            Context(states, state.comm)
    assert state.context is not None
    return state.context
