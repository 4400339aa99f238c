"""`compress_gradients`, and its checks before anything changes."""

from torch import nn

from mpitrain.placement.agreement import check_alike
from mpitrain.placement.parts import part_of
from mpitrain.sharding.compression.compression import Compression, matrix_shape
from mpitrain.sharding.compression.power_sgd import PowerSGD
from mpitrain.sharding.compression.top_k import TopK
from mpitrain.sharding.module import steps_of
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import compression_of, diloco_of, params_by_shard, slices_of, units_of

_WHERE = "compression needs whole matrices: call fully_shard with stage=0, or with copies (dp_replicate) and cut='parameters'"


def compress_gradients(model: nn.Module, hook: PowerSGD | TopK) -> None:
    """From now on average the gradients of a sharded model over its copies in compressed form. Collective, before the first forward.

    `hook`: `power_sgd(...)` or `top_k(...)`, with the same arguments on all ranks. In stage 0 the copies are those of all ranks. With
    `dp_replicate` they are the copies of the shards: pass cut="parameters" to `fully_shard`, so that no matrix is cut. On several
    nodes a node's ranks add up their gradients exactly, and only messages between nodes are compressed; on one node each rank's
    message is. Vectors and small matrices stay exact, as do parameters that two stages of a pipeline share, and fp64 and complex ones.
    Convolutions count as matrices (out, rest). Residuals and messages are fp32; `mpitrain.save` and `load` keep the residuals on any
    number of ranks.

    Raises:
        ValueError: on all ranks: the ranks pass different hooks, a matrix is cut into rows, the model has one copy, is not sharded, has
            a hook already, or trains in local steps (`DiLoCo`), which send no gradients between copies.
        TypeError: another kind of hook.
        RuntimeError: the model has run.
    """
    if not isinstance(hook, PowerSGD | TopK):
        raise TypeError(
            f"compress_gradients: hook is {hook!r}; expected mpitrain.power_sgd(...) or mpitrain.top_k(...)"
        )
    units = units_of(model)
    if not units:
        raise ValueError("compress_gradients: the model is not sharded; call fully_shard(model, stage=0) first")
    ranks = units[0].ranks
    with ranks.data_parallel.together():
        if compression_of(model) is not None:
            raise ValueError("compress_gradients: the model has a hook already; expected one call")
        if slices_of(model) is not None:
            raise ValueError(
                "compress_gradients: the model has slices, whose gradients are added up exactly; expected one of the two"
            )
        if diloco_of(model) is not None:
            raise ValueError(
                "compress_gradients: the model's steps are local (DiLoCo), which send no gradients between copies; expected one of "
                "the two"
            )
        if steps_of(model):
            raise RuntimeError("compress_gradients: the model has run; expected a call before its first forward")
        if any(unit.ranks.replicate is not ranks.replicate for unit in units):
            raise ValueError("compress_gradients: parts of the model have copies on different ranks; expected one mesh")
        if ranks.shard.size > 1 and not ranks.has_replicas:
            raise ValueError(f"compress_gradients: one copy is sharded over {ranks.shard.size} ranks; {_WHERE}")
        for flat in (flat for unit in units for flat in unit.flats):
            for index, param in enumerate(flat.params):
                if _is_compressed(param, hook) and _is_cut(flat, index):
                    raise ValueError(
                        f"compress_gradients: {param.name} is cut into rows over {ranks.shard.size} ranks; {_WHERE}"
                    )
    check_alike(
        ranks.data_parallel, [repr(hook)], caller="compress_gradients", remedy="pass the same hook on all ranks"
    )
    shards, named = params_by_shard(model), {}
    for name, shown in model.named_parameters():
        if shown in shards:
            named[name] = shards[shown]
    exact = {name for name, param in named.items() if not _is_compressed(param, hook)}
    compression = Compression(hook, ranks, named, exact)
    for unit in units:
        unit.compression = compression


def _is_compressed(param: ShardedParameter, hook: PowerSGD | TopK) -> bool:
    shape, part = matrix_shape(param), part_of(param.full)
    # Two stages know a shared parameter by different names, and would begin with different bases.
    return shape is not None and hook.takes(*shape) and (part is None or part.tied is None)


def _is_cut(flat: FlatParameters, index: int) -> bool:
    """Whether some rank has a part of a parameter; the same on all ranks."""
    numel = flat.params[index].full.numel()
    return any(0 < flat.layout.box(index, rank).numel < numel for rank in range(flat.ranks.shard.size))
