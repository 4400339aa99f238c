"""The arguments of `fully_shard`, their checks before the model is changed, and what must be the same on all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from collectives import Communicator, Mesh
from collectives.selection.wire import network_format
from mpitrain.placement.marks import box_of, name_before
from mpitrain.placement.parts import part_of
from mpitrain.sharding.ranks import DataParallelRanks, are_apart, is_within
from mpitrain.sharding.unit.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.unit import kind_of, unit_of


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The arguments of `fully_shard`; see its docstring. TypeError or ValueError for wrong values."""

    mesh: Mesh | Communicator | None
    stage: int
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: CPUOffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None  # a tuple after `__post_init__`
    units: str | Iterable[nn.Module]  # a tuple after `__post_init__`
    storage: str
    prefetch_bytes: int | None
    device: torch.device | str | None
    cut: Literal["rows", "parameters"]
    wire: Any  # the format between nodes after `__post_init__`
    wire_weights: Any  # the same
    slices: int

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | Communicator | None):
            raise TypeError(
                f"fully_shard: mesh is {self.mesh!r}; expected a collectives.Communicator, a collectives.Mesh with the axes "
                "dp_replicate, dp_shard and cp, or None for all ranks"
            )
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"fully_shard: stage is {self.stage!r}; expected 0, 1, 2 or 3")
        if self.stage == 0 and self.storage == "resident":
            raise ValueError("fully_shard: in stage 0 each rank has its own copy; pass storage='auto', or stage 1 to 3")
        if not isinstance(self.mp_policy, MixedPrecisionPolicy | None):
            raise TypeError(
                f"fully_shard: mp_policy is {self.mp_policy!r}; expected a mpitrain.MixedPrecisionPolicy, as in "
                "MixedPrecisionPolicy(torch.bfloat16), or None"
            )
        if self.prefetch_bytes is not None and (type(self.prefetch_bytes) is not int or self.prefetch_bytes < 0):
            raise ValueError(
                f"fully_shard: prefetch_bytes is {self.prefetch_bytes!r}; expected a number of bytes from 0, or None"
            )
        if not isinstance(self.offload_policy, CPUOffloadPolicy | None):
            raise ValueError(
                f"fully_shard: offload_policy is {self.offload_policy!r}; expected CPUOffloadPolicy() or None"
            )
        if self.storage not in ("auto", "resident", "private"):
            raise ValueError(f"fully_shard: storage is {self.storage!r}; expected 'auto', 'resident' or 'private'")
        if self.cut not in ("rows", "parameters"):
            raise ValueError(f"fully_shard: cut is {self.cut!r}; expected 'rows' or 'parameters'")
        object.__setattr__(self, "units", _units(self.units))
        for name in ("wire", "wire_weights"):
            object.__setattr__(self, name, network_format(getattr(self, name), f"fully_shard: {name}"))
        if type(self.slices) is not int or self.slices < 0 or self.slices.bit_count() > 1:
            raise ValueError(
                f"fully_shard: slices is {self.slices!r}; expected a power of two, the number of slices of a global batch, or 0"
            )
        if self.stage == 0 and self.wire_weights != "fp32":
            raise ValueError(
                f"fully_shard: wire_weights is {self.wire_weights!r}; in stage 0 each rank has all parameters, and sends none; pass "
                "wire_weights='fp32', or stage 1 to 3"
            )
        if self.slices and (self.wire, self.wire_weights) != ("fp32", "fp32"):
            raise ValueError(
                f"fully_shard: slices need sums that do not depend on the number of ranks, and wire={self.wire!r}, "
                f"wire_weights={self.wire_weights!r} encode between nodes; expected fp32 for both, or slices=0"
            )
        # A generator can be read only once.
        object.__setattr__(self, "ignored_params", _ignored(self.ignored_params))
        object.__setattr__(self, "device", _device(self.device))

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes."""
        return self.mp_policy or MixedPrecisionPolicy()

    @property
    def ignored(self) -> set[int]:
        """The ids of parameters that are not sharded."""
        return {id(param) for param in self.ignored_params or ()}

    def described(self) -> list[str]:
        """The arguments as lines of text. Ranks with the same arguments have the same lines."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "mesh":
                value = dict(value.axes) if isinstance(value, Mesh) else "the ranks of a communicator"
            elif field.name == "device":
                value = None if value is None else value.type  # each rank has its own GPU
            elif field.name == "ignored_params" or (field.name == "units" and not isinstance(value, str)):
                continue  # described in lines of their own
            words.append(f"{field.name}={value!r}")
        return words


def _units(units: Any) -> str | tuple[nn.Module, ...]:
    if isinstance(units, str) or not isinstance(units, Iterable):
        if units not in ("auto", "one"):
            raise ValueError(f"fully_shard: units is {units!r}; expected 'auto', 'one' or modules")
        return str(units)
    units = tuple(units)
    for unit in units:
        if not isinstance(unit, nn.Module):
            raise TypeError(f"fully_shard: units has {_shown(unit)}; expected only modules, as in units=model.blocks")
    return units


def _ignored(params: Any) -> tuple[nn.Parameter, ...]:
    if params is None:
        return ()
    if isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(
            f"fully_shard: ignored_params is {_shown(params)}; expected a list of parameters, such as [model.head.weight]"
        )
    params = tuple(params)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"fully_shard: ignored_params has {_shown(param)}; expected only parameters, as in [model.head.weight]"
            )
        if box_of(param) is not None or name_before(param) is not None:
            raise ValueError(
                f"fully_shard: ignored_params has a parameter that is sharded already, {name_before(param) or 'a shard'}; "
                "pass it to the call that shards it"
            )
    return params


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _device(device: Any) -> torch.device | None:
    if device is None:
        return None
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        made = None
    if made is None or made.type == "meta":
        raise ValueError(f"fully_shard: device is {device!r}; expected a device with memory, such as 'cpu' or 'cuda:0'")
    return made


REMEDY = "build the same model on all ranks and shard it with the same arguments in the same order"


def described(module: nn.Module, options: ShardingOptions) -> list[str]:
    """One line for each argument, parameter and buffer that must be the same on all ranks."""
    lines = [f"a module {kind_of(module).__name__}", *options.described()]
    if not isinstance(options.units, str):
        units = {id(unit) for unit in options.units}
        lines += [f"a unit {name}" for name, part in module.named_modules() if id(part) in units]
    ignored = options.ignored
    names: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied = names.setdefault(id(param), name)
        if tied != name:
            lines.append(f"parameter {name}, tied to {tied}")
        elif box_of(param) is not None:
            lines.append(f"parameter {name}, sharded already")
        else:
            how = ", ignored" if id(param) in ignored else "" if param.requires_grad else ", frozen"
            dtype = str(param.dtype).removeprefix("torch.")
            lines.append(f"parameter {name} of shape {tuple(param.shape)}, {dtype}, on {param.device.type}{how}")
    for name, buffer in module.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        lines.append(f"buffer {name} of shape {tuple(buffer.shape)}, {dtype}, on {buffer.device.type}")
    return lines


def check_module(module: Any) -> None:
    """TypeError or ValueError for a module that cannot be sharded."""
    if isinstance(module, list | tuple):
        raise TypeError(
            "fully_shard: got a list of modules; torch's function makes it one unit, this function takes one module: call "
            "fully_shard for each module, or for the module that contains them"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: got {module!r}; expected a torch.nn.Module")
    if unit_of(module) is not None:
        raise ValueError(f"fully_shard: this {type(module).__name__} is sharded already")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard: a {type(module).__name__} has no forward, around which its parameters could be gathered; shard the modules "
            "in it one by one, or the module that contains it"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"fully_shard: {name} has no shape yet, as in a lazy module (LazyLinear) before its first forward; run the model "
                "once before fully_shard, or give the sizes (Linear)"
            )


def check_units(module: nn.Module, options: ShardingOptions) -> None:
    """ValueError for modules that cannot be units within `module`."""
    if isinstance(options.units, str):
        return
    names = {id(part): name for name, part in module.named_modules() if name}
    earlier: set[int] = set()
    for unit in options.units:
        check_module(unit)
        if id(unit) not in names:
            raise ValueError(
                f"fully_shard: units has a {type(unit).__name__} that is not within the {type(module).__name__}; expected parts of it, "
                "as in units=model.blocks"
            )
        if id(unit) in earlier:
            raise ValueError(
                f"fully_shard: units has {names[id(unit)]} twice, or after a module around it; expected inner modules first"
            )
        earlier |= {id(part) for part in unit.modules()}


def check_dtypes(module: nn.Module, options: ShardingOptions) -> None:
    """TypeError for dtypes that cannot be reduced, of parameters or in the policy."""
    policy, ignored = options.policy, options.ignored
    for param in module.parameters():
        if box_of(param) is None and id(param) not in ignored:
            policy.dtypes_of(param.dtype)


def check_dense(module: nn.Module, options: ShardingOptions) -> None:
    """ValueError for embeddings with sparse gradients, which are not reduced. Also for frozen ones, which may be thawed."""
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.sparse:
            continue
        if box_of(part.weight) is None and id(part.weight) not in options.ignored:
            weight = f"{name}.weight" if name else "weight"
            raise ValueError(
                f"fully_shard: the gradient of {weight} is sparse ({type(part).__name__}(sparse=True)), and sparse gradients are not "
                "reduced over ranks; pass sparse=False, or keep the parameter whole on each rank by ignored_params"
            )


def check_batch_norms(module: nn.Module) -> None:
    """ValueError for torch's SyncBatchNorm: without torch.distributed it computes, in silence, the statistics of this rank alone."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"fully_shard: {name or 'the module'} is a torch.nn.SyncBatchNorm, which finds the other ranks by torch.distributed "
                "alone; call mpitrain.convert_sync_batchnorm(model) before fully_shard, which replaces it"
            )


def check_slices(slices: int, ranks: DataParallelRanks) -> None:
    """ValueError if there are fewer slices than ranks with different data."""
    if 0 < slices < ranks.data_parallel.size:
        raise ValueError(
            f"fully_shard: slices is {slices}, and {ranks.data_parallel.size} ranks have different data, each of which trains whole "
            f"slices; expected {1 << (ranks.data_parallel.size - 1).bit_length()} or a larger power of two"
        )


def check_parts(module: nn.Module, ranks: DataParallelRanks, mesh: Mesh | Communicator | None) -> None:
    """ValueError if a parameter is cut, or in a stage, over ranks that the mesh does not know as ranks of one copy."""
    num_stages = mesh.axes.get("pp", 1) if isinstance(mesh, Mesh) else 1
    for name, param in module.named_parameters():
        part = part_of(param)
        if num_stages > 1 and (part is None or part.stages is None):
            raise ValueError(
                f"fully_shard: {name} is in no stage, but the mesh has pp={num_stages} stages, whose ranks would train models "
                'that differ; call mpitrain.pipeline(model, mesh["pp"], ...) before fully_shard'
            )
        over = [] if part is None else [(part.over, "cut", "tensor_parallel"), (part.stages, "in a stage", "pipeline")]
        for comm, how, by in over:
            if comm is None or (is_within(comm, ranks.copy) and are_apart(comm, ranks.data_parallel)):
                continue
            raise ValueError(
                f"fully_shard: {name} is {how} over {comm.size} ranks, which do not hold one copy of the model in the mesh of "
                f"fully_shard, or get different data there; pass the mesh whose axis {by} got: "
                "mesh = mpitrain.mesh(comm, tp=..., pp=...)"
            )
