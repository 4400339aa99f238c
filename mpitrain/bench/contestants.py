"""Who takes part: the same GPT, sharded by us and by the peers, and the parts of its step."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from mpitrain.bench.contestant import Contestant, Place
from mpitrain.bench.options import OURS
from mpitrain.init import fill_, initialize
from mpitrain.models import GPT, GPTConfig
from mpitrain.sharding import MixedPrecisionPolicy, communication_s, fully_shard


class Sharded(Contestant):
    """Ours, which knows its communication on CPUs. On GPUs that runs beside the computation, unseen by the host."""

    def communication_s(self) -> float | None:
        is_seen = next(self.model.parameters()).device.type == "cpu"
        return communication_s(self.model) if is_seen else None


def contestant(name: str, config: GPTConfig, place: Place) -> Contestant:
    """Make one. Collective."""
    match name:
        case "none":
            return Contestant(name, _plain(config, place), autocast=_autocast(place))
        case "ddp":
            ids = None if place.device.type == "cpu" else [place.device.index]
            model = nn.parallel.DistributedDataParallel(_plain(config, place), device_ids=ids)
            return Contestant(name, model, autocast=_autocast(place))
        case "fsdp":
            return Contestant(name, _fsdp(config, place))
        case "deepspeed":
            from mpitrain.bench.deepspeed import DeepSpeed

            return DeepSpeed(_plain(config, place), place)
    assert name == OURS
    return Sharded(name, _ours(config, place))


def _plain(config: GPTConfig, place: Place) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=place.device)
    initialize(model)
    return model


def _ours(config: GPTConfig, place: Place) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
    policy = MixedPrecisionPolicy(param_dtype=place.dtype)
    for module in (*model.blocks, model):
        fully_shard(module, place.comm, mp_policy=policy, device=place.device)
    initialize(model)
    return model


def _fsdp(config: GPTConfig, place: Place) -> GPT:
    """torch's FSDP2, which is also made on the meta device: no rank ever holds the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    with torch.device("meta"):
        model = GPT(config)
    mesh = init_device_mesh(place.device.type, (place.comm.size,))
    policy = TorchPolicy(param_dtype=place.dtype)
    for module in (*model.blocks, model):
        torch_fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=place.device)
    for name, param in model.named_parameters():
        rows: torch.Tensor = param.to_local()  # type: ignore[attr-defined]  # a DTensor, cut as torch.chunk cuts
        first = min(-(-param.shape[0] // place.comm.size) * place.comm.rank, param.shape[0])
        offset = (first, *[0] * (param.ndim - 1))
        fill_(rows, model.init_rule(name), seed=0, name=name, shape=param.shape, offset=offset)
    return model


def _autocast(place: Place) -> AbstractContextManager[Any] | None:
    return None if place.dtype == torch.float32 else torch.autocast(place.device.type, place.dtype)
