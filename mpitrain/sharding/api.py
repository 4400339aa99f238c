"""`fully_shard`, with the meaning of torch's function of this name.

ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020) shards the optimizer's state
in stage 1, also the gradients in stage 2, and also the parameters in stage 3. Here stage 1 keeps the shards of gradients, too: it
reduces the gradients at the end of the backward, and stage 2 during the backward. Flat units, and hybrid sharding with several copies
of the shards, follow torch's FSDP (Zhao et al., VLDB 2023).
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from collectives import Communicator, Mesh, launched_rank
from collectives.transports.node.anonymous import ShortOfMemoryError
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import box_of, is_ignored, mark_ignored, mark_renamed, mark_replaced, name_before
from mpitrain.placement.parts import ParameterPart, part_of, tensor_ranks_of
from mpitrain.sharding.methods import leave_fast_path, refuse_methods, register_generate
from mpitrain.sharding.module import ShardedModule, guard, sharded_kind
from mpitrain.sharding.optim.before_step import watch_steps
from mpitrain.sharding.optim.torch_calls import watch_calls
from mpitrain.sharding.ranks import DataParallelRanks, WiredGroups, data_parallel_ranks, group_for_weights, wire_groups
from mpitrain.sharding.setup.blocks import check_names, stacked_blocks
from mpitrain.sharding.setup.options import (
    REMEDY,
    ShardingOptions,
    check_batch_norms,
    check_dense,
    check_dtypes,
    check_module,
    check_parts,
    check_slices,
    check_units,
    described,
)
from mpitrain.sharding.setup.room import NewUnit, lacks_room, say_private
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.layout import Cut
from mpitrain.sharding.unit.parameter import guard_shards
from mpitrain.sharding.unit.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.storage import Gathered, Kept, Resident, Shapes, Storage
from mpitrain.sharding.unit.unit import Promise, Unit, enter, kind_of, sharded_params, units_of
from mpitrain.torch_glue.heap import keep_freed_memory
from mpitrain.torch_glue.torch_internals import keep_compiler_out

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
    units: Literal["auto", "one"] | Iterable[nn.Module] = "auto",
    storage: Literal["auto", "resident", "private"] = "auto",
    prefetch_bytes: int | None = None,
    device: torch.device | str | None = None,
    cut: Cut = "rows",
    wire: str | Mapping[str, str] = "fp32",
    wire_weights: str | Mapping[str, str] = "fp32",
    slices: int = 0,
) -> nn.Module:
    """Shard the parameters of `module` that belong to no unit yet over the ranks of `mesh`, in place. Returns the module. Collective.

    Call it for the blocks first, then for the whole model, then make the optimizer: `model.parameters()` are now the shards, in the
    same order and number on all ranks. A call for the whole model alone chooses the blocks itself, or takes them as `units`. All ranks
    take the parameters of rank 0. Parameters on the meta device get memory here, and values from `mpitrain.initialize` or a checkpoint.

    Args:
        module: the model, or a part of it.
        mesh: a Communicator, over which one copy is sharded; or a Mesh with shards along its axes `dp_shard` and `cp`, and copies of
            the shards along `dp_replicate`; None: `collectives.world()`. Parts of a model may have another mesh of the same ranks.
        stage: what is sharded. 0: nothing; each rank has a copy of the model, and the backward averages the gradients, as torch's
            DistributedDataParallel does. 1 and 2: the optimizer's state and the gradients, which stage 1 reduces at the end of the
            backward, and stage 2 during the backward. 3: also the parameters.
        reshard_after_forward: True frees private full parameters of stage 3 after the forward, and gathers them again for the backward.
            False keeps them. A number N: between forward and backward each group of N neighbouring ranks, for instance those of a
            node, holds them together, and gathers them for the backward within the group. N divides the number of ranks that hold
            the shards; 1 means False, all ranks mean True.
        mp_policy: the dtypes; None: those of the parameters.
        offload_policy: `CPUOffloadPolicy()` keeps shards and the optimizer's state in host memory, for parameters on GPUs.
        ignored_params: parameters (not names) that stay as they are on every rank. Parameters of other parts of the model are allowed.
        units: what is gathered and reduced as a whole. "auto": if no part of the module is sharded yet, each block of its stacks (the
            layers of a transformer, but no experts and no modules without a forward), and the remaining parameters together.
            "one": all parameters together. Modules within the module: each of them, inner ones before the modules around them, and
            the remaining parameters together.
        storage: the memory of full parameters. "resident", from stage 1 on: one copy in the shared memory of each node. A rank may
            skip a unit, or run it more often than other ranks. "private": each rank has its own full parameters. In stage 3 they are
            gathered around the forward of the unit's module. Then all ranks must run the same units in the same order, because a
            gather needs all ranks; a rank that skips a unit causes an error, or a wait until the deadline. Ranks may differ within a
            unit. Stages 0 to 2 gather nothing, and ranks may differ as with "resident". "auto": resident for parameters on CPUs if
            the shared memory of all nodes suffices for all units of this call, otherwise private.
        prefetch_bytes: the bytes of private full parameters of stage 3 that may be gathered before their use, in the order of the last
            step, if gathers overlap with computation (with a progress thread, or by NCCL). None: the size of the largest unit within
            this module; 0: no prefetch. The value of the outermost module is used.
        device: the device of parameters that are on the meta device; None: the CPU.
        cut: "rows": the shards of a unit are as equal as rows of parameters allow. "parameters": each parameter is whole in one shard,
            as `compress_gradients` needs it between copies of the shards; then shards are as equal as parameters allow.
        wire: the format in which gradients are sent between nodes: "fp32" (as they are), "bf16", "fp16", "int8", "fp8", or "auto", int8
            where a measurement of the network says that it pays, else fp32. They are summed in fp32, and all ranks get the same bits.
            Within a node nothing is encoded, and arrays in GPU memory are not where NCCL or CUDA-aware MPI moves them. A dict
            {"node": "fp32", "network": "int8"} means the same as "int8".
        wire_weights: the same for gathers of weights, which stage 0 has not. Below fp32 the shards are masters with all bits, which the
            optimizer updates and checkpoints have, and the full parameters have the values that were sent.
        slices: a power of two: into how many equal slices a global batch is divided, so that gradients are bitwise the same at any
            number of ranks. Each backward is a `Round` of `mpitrain.rounds(model)`, which names its slice, and after the last one of
            a step the gradient of the shards is the mean over the slices. 0: no slices.

    Raises:
        TypeError: an argument of a wrong type, or dtypes that cannot be reduced.
        ValueError: an argument that is wrong or not available, a module that is sharded already or has no forward, lazy parameters
            without a shape, on several ranks embeddings with sparse gradients or torch's SyncBatchNorm, tied weights across units;
            on all ranks, if the ranks differ in the model or in the arguments.
        OSError: on all ranks, if the shared memory of a node is full and "resident" was requested. Units made before stay sharded, and
            another call, for instance with storage="private", shards the rest.
    """
    watch_steps()
    watch_calls()
    keep_compiler_out()
    check_module(module)
    options = ShardingOptions(
        mesh=mesh, stage=stage, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy, offload_policy=offload_policy,
        ignored_params=ignored_params, units=units, storage=storage, prefetch_bytes=prefetch_bytes, device=device,
        cut=cut, wire=wire, wire_weights=wire_weights, slices=slices,
    )  # fmt: skip
    check_units(module, options)
    check_dtypes(module, options)
    ranks = data_parallel_ranks(mesh, whole=stage == 0, tensor=tensor_ranks_of(module.parameters()))
    check_parts(module, ranks, mesh)
    check_slices(options.slices, ranks)
    check_alike(ranks.data_parallel, described(module, options), caller="fully_shard", remedy=REMEDY)
    if ranks.data_parallel.size > 1:
        check_dense(module, options)
        check_batch_norms(module)
    ranks = wire_groups(ranks, options.wire, options.wire_weights)
    reshards, num_group = _resharding(reshard_after_forward, ranks.shard.size if stage == 3 else None)
    policy = options.policy
    blocks = _blocks(module, options)
    if blocks or units_of(module):  # with single parts, a name may be of another part: see blocks.py
        check_names(module, policy.keep_fp32)

    slices_of_step = Slices.of(options.slices, ranks) if options.slices else None

    names = {id(part): name for name, part in module.named_modules()}
    kept = [part for name, part in module.named_modules() if name and policy.keeps(name, kind_of(part))]
    are_kept = {id(part) for part in kept}
    within_kept = {id(inner) for part in kept for inner in part.modules() if inner is not part}

    def policy_of(part: nn.Module) -> MixedPrecisionPolicy:
        if id(part) in within_kept:
            return replace(policy.of_kept(), output_dtype=None)  # the modules around it compute in fp32, too
        if id(part) in are_kept:
            return policy.of_kept()
        # Only the output of the whole module is cast.
        return policy if part is module else replace(policy, output_dtype=None)

    def shard_part(part: nn.Module) -> None:
        its = policy_of(part)
        kinds = _by_kind(part, names[id(part)], options.ignored, ranks.wired, has_slices=bool(options.slices))
        unit = Unit(
            ranks, [_flat(params, ranks, its, options, num_group, slices_of_step) for params in kinds], its,
            stage=stage, reshard_after_forward=reshards, prefetch_bytes=prefetch_bytes, is_automatic=part is not module,
            slices=slices_of_step,
        )  # fmt: skip
        # All checks and allocations have passed. Until here this part of the model is unchanged.
        for name, _, original in (param for params in kinds for param in params):
            mark_replaced(original, name, "fully_shard")
        for name, param in part.named_parameters(prefix=names[id(part)]):
            if id(param) in options.ignored:  # the units of modules around this part leave the parameter alone, too
                mark_ignored(param, name, ranks, is_ordered=bool(options.slices))
        unit.reshard()
        enter(unit)
        guard_shards(unit.params)
        part.__class__ = sharded_kind(type(part))
        part._unit = unit  # type: ignore[assignment]
        guard(part)  # type: ignore[arg-type]

    if options.storage == "auto" and stage > 0:
        new = _new_units([*kept, *blocks, module], policy_of, options)
        would_keep = _would_keep(options, ranks)
        if new and lacks_room(new, units_of(module), ranks, would_keep=would_keep, has_slices=bool(options.slices)):
            options = replace(options, storage="private")
    for whole in (*blocks, module):
        inside = {id(part) for part in whole.modules() if part is not whole}
        for part in kept:
            is_sharded = isinstance(part, ShardedModule) or all(
                box_of(param) is not None for param in part.parameters()
            )
            if id(part) in inside and not is_sharded:
                shard_part(part)
        shard_part(whole)
    units_of(module)[0].promise = Promise(policy.keep_fp32, tuple(options.ignored_params or ()))
    for param in sharded_params(module):  # error messages name parameters as seen from the outermost module
        owner, name = param.users[0]
        param.name = f"{names[id(owner)]}.{name}" if names.get(id(owner)) else name
        mark_renamed(param.shard, param.name)
    refuse_methods(module, is_cut=ranks.shard.size > 1)
    register_generate(module)
    leave_fast_path(module)
    return module


NamedParams = list[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]]
"""The parameters of one flat buffer: for each its name, the modules that use it with their names for it, and the parameter."""


def _blocks(module: nn.Module, options: ShardingOptions) -> list[nn.Module]:
    """The blocks that are sharded first. "auto" finds none if the user has sharded parts of the module."""
    if options.units != "auto":
        return [] if isinstance(options.units, str) else [*options.units]
    blocks = [block for block in stacked_blocks(module) if not isinstance(block, ShardedModule)]
    if all(unit.is_automatic for unit in units_of(module)):
        return blocks
    if blocks:
        _log.log(
            logging.WARNING if launched_rank() <= 0 else logging.INFO,
            "fully_shard: parts of this %s are sharded already, so its other blocks (%d, the first a %s) become one unit with the "
            "rest; shard all of them, or none", kind_of(module).__name__, len(blocks), kind_of(blocks[0]).__name__,
        )  # fmt: skip
    return []


def _new_units(
    parts: Iterable[nn.Module], policy_of: Callable[[nn.Module], MixedPrecisionPolicy], options: ShardingOptions
) -> list[NewUnit]:
    """The units of `parts`, inner ones first, with the parameters on the CPU that no unit has yet."""
    seen, units = options.ignored, []
    for part in parts:
        params = [
            param
            for param in part.parameters()
            if id(param) not in seen
            and box_of(param) is None
            and not is_ignored(param)
            and _home(param, options).type == "cpu"
        ]
        seen |= {id(param) for param in params}
        if params:
            units.append(NewUnit(params, policy_of(part)))
    return units


def _home(param: nn.Parameter, options: ShardingOptions) -> torch.device:
    """The device of a full parameter once it has memory."""
    return torch.device(options.device or "cpu") if param.device.type == "meta" else param.device


def _flat(
    params: NamedParams,
    ranks: DataParallelRanks,
    policy: MixedPrecisionPolicy,
    options: ShardingOptions,
    num_group: int | None,
    slices: Slices | None,
) -> FlatParameters:
    """Put `params` into one flat buffer. Collective."""
    original = params[0][2]
    if ranks.wired.encodes_weights and original.ndim < 2:
        # As in ZeRO++, where small parameters are not gathered: an error of gains near 1 changes all activations.
        ranks = ranks._replace(wired=ranks.wired._replace(weights=ranks.shard, encodes_weights=False))
    device = _home(original, options)
    if options.storage == "resident" and device.type != "cpu":
        raise ValueError(f"storage='resident' needs parameters on the CPU; these are on {device}; use storage='auto'")
    if device.type == "cpu":
        keep_freed_memory()
    shapes = [tuple(param.shape) for _, _, param in params]
    storage = _storage(shapes, policy.dtypes_of(original.dtype)[0], device, ranks, options, num_group)
    return FlatParameters(params, ranks, policy, device, storage, options.offload_policy, slices)


def _would_keep(options: ShardingOptions, ranks: DataParallelRanks) -> bool:
    """Whether each rank keeps a copy of the full parameters in private storage."""
    return options.stage < 3 or ranks.shard.size == 1


def _storage(
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    ranks: DataParallelRanks,
    options: ShardingOptions,
    num_group: int | None,
) -> Storage:
    """The storage of full parameters; `num_group` ranks hold gathered parameters between forward and backward. Collective."""
    if options.storage != "private" and options.stage > 0 and device.type == "cpu":
        resident, problem = None, None
        try:
            # "auto" has decided for all units: if another job has taken the room since then, this one is of the same kind.
            resident = Resident(
                shapes, ranks.wired.weights, dtype, device, cut=options.cut, or_anonymous=options.storage == "auto"
            )
        except OSError as error:
            problem = error
        # One node may lack the memory.
        problems = ranks.data_parallel.all_gather_object(
            None if problem is None else (str(problem), isinstance(problem, ShortOfMemoryError))
        )
        found = [each for each in problems if each is not None]
        if not found and resident is not None:
            return resident
        reason = found[0][0]
        is_short = any(its for _, its in found)
        if is_short and not _would_keep(options, ranks):
            reason += ", or choose storage='private' (--parallel.storage private)"
        # What the machine has free may not choose the storage, see `Room`.
        if options.storage == "resident" or is_short:
            with ranks.data_parallel.together():  # so that all ranks know of it
                raise OSError(reason) from problem
        say_private(ranks.data_parallel, reason)
    if _would_keep(options, ranks):
        return Kept(shapes, ranks.wired.weights, dtype, device, cut=options.cut)
    group = None if num_group is None else group_for_weights(ranks, num_group)
    return Gathered(shapes, ranks.wired.weights, dtype, device, group, cut=options.cut)


def _resharding(asked: Any, size: int | None) -> tuple[bool, int | None]:
    """Whether full parameters are freed after the forward, and the size of the group that then holds them (None: all ranks).

    `size`: the number of ranks that hold the shards; None if full parameters are never freed.
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


def _by_kind(
    module: nn.Module, path: str, ignored: set[int], wired: WiredGroups, *, has_slices: bool
) -> list[NamedParams]:
    """The parameters of a module that belong to no unit yet, by dtype, requires_grad, device, and which ranks hold them alike.

    `path`: the module's name. If weights are encoded, vectors are apart from matrices, because they are sent exactly. With slices the
    stages of a pipeline are apart, because each has rounds of its own.
    """
    inside = {id(m) for child in module.modules() if isinstance(child, ShardedModule) for m in child.modules()}
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, owner in module.named_modules(prefix=path):
        for name, param in owner._parameters.items():
            if param is None or box_of(param) is not None or is_ignored(param) or id(param) in ignored:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if name_before(param) is not None or id(owner) in inside:
                raise ValueError(
                    f"fully_shard: {full_name} is tied to, or was added to, a unit that exists already "
                    f"({name_before(param) or 'a sharded module'}); "
                    "apply fully_shard to the lowest module that contains all users of a parameter, and to none of them alone"
                )
            users.setdefault(id(param), []).append((owner, name))
            found.setdefault(id(param), (full_name, param))
    kinds: dict[Hashable, NamedParams] = {}
    for key, (name, param) in found.items():
        alike = _ranks_alike(part_of(param), is_lossy=wired.is_lossy)
        stage = part.stage if has_slices and (part := part_of(param)) is not None else None
        kind = param.dtype, param.requires_grad, param.device, wired.encodes_weights and param.ndim < 2, stage, *alike
        kinds.setdefault(kind, []).append((name, users[key], param))
    return list(kinds.values())


def _ranks_alike(part: ParameterPart | None, *, is_lossy: bool) -> tuple[bool, Communicator | None]:
    """Whether several stages hold a parameter alike, and the tensor-parallel ranks that do so, if the wire could make it differ.

    In a buffer of its own such a parameter has the same rows on each of these ranks, whatever else they have, and the errors of a wire
    are the same, too ([Note: alike] in ranks.py).
    """
    copies = None if part is None or not is_lossy else part.copies
    return part is not None and part.tied is not None, copies if copies is not None and copies.size > 1 else None
