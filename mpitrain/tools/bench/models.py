"""Our model and the peers' models: the same GPT, sharded or not."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from collectives.bench.kit.torch_group import torch_group
from collectives.bench.kit.turns import CannotTakePart
from mpitrain.models import GPT, GPTConfig
from mpitrain.placement.fills import fill_
from mpitrain.sharding import MixedPrecisionPolicy, communication_s, fully_shard
from mpitrain.tools.bench.model import TrainedModel, TrainingSetup
from mpitrain.tools.bench.options import NO_DEEPSPEED, OURS, PIPELINES, SEQUENCE, TENSOR, has_deepspeed
from mpitrain.tools.bench.pipelines import TORCH_SCHEDULES, OurPipeline, TorchPipeline
from mpitrain.tools.bench.tensor import TensorParallel, TorchTensorParallel
from mpitrain.weights.initial_values import initialize


class Ours(TrainedModel):
    """Our model. It measures its communication on CPUs; on GPUs the host does not see the communication."""

    def communication_s(self) -> float | None:
        is_seen = next(self.model.parameters()).device.type == "cpu"
        return communication_s(self.model) if is_seen else None


def ours(config: GPTConfig, setup: TrainingSetup) -> TrainedModel:
    """Our `fully_shard`, block by block."""
    with torch.device("meta"):
        model = GPT(config)
    policy = MixedPrecisionPolicy(param_dtype=setup.dtype)
    for module in (*model.blocks, model):
        fully_shard(module, setup.comm, mp_policy=policy, device=setup.device)
    initialize(model)
    return Ours(model)


def none(config: GPTConfig, setup: TrainingSetup) -> TrainedModel:
    """Each rank trains alone on an unsharded copy."""
    return TrainedModel(_plain(config, setup), autocast=_autocast(setup))


def ddp(config: GPTConfig, setup: TrainingSetup) -> TrainedModel:
    """torch's DistributedDataParallel."""
    _need_torch_distributed(setup)
    ids = None if setup.device.type == "cpu" else [setup.device.index]
    model = nn.parallel.DistributedDataParallel(_plain(config, setup), device_ids=ids)
    return TrainedModel(model, autocast=_autocast(setup))


def fsdp(config: GPTConfig, setup: TrainingSetup) -> TrainedModel:
    """torch's FSDP2, also made on the meta device, so that no rank ever holds the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    _need_torch_distributed(setup)
    with torch.device("meta"):
        model = GPT(config)
    mesh = init_device_mesh(setup.device.type, (setup.comm.size,))
    policy = TorchPolicy(param_dtype=setup.dtype)
    for module in (*model.blocks, model):
        torch_fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=setup.device)
    for name, param in model.named_parameters():
        rows: torch.Tensor = param.to_local()  # type: ignore[attr-defined]  # a DTensor, cut as torch.chunk cuts
        first = min(-(-param.shape[0] // setup.comm.size) * setup.comm.rank, param.shape[0])
        offset = (first, *[0] * (param.ndim - 1))
        fill_(rows, model.init_rule(name), seed=0, name=name, shape=param.shape, offset=offset)
    return TrainedModel(model)


def deepspeed(config: GPTConfig, setup: TrainingSetup) -> TrainedModel:
    """DeepSpeed's ZeRO stage 3."""
    if not all(setup.comm.all_gather_object(has_deepspeed())):
        raise CannotTakePart(NO_DEEPSPEED)
    _need_torch_distributed(setup)
    from mpitrain.tools.bench.deepspeed import DeepSpeed

    return DeepSpeed(_plain(config, setup), setup)


def tensor(config: GPTConfig, setup: TrainingSetup, *, sequence: bool = False) -> TrainedModel:
    """Our `tensor_parallel` over all ranks."""
    _check_heads(config, setup)
    return TensorParallel(config, setup, sequence=sequence)


def torch_tensor(config: GPTConfig, setup: TrainingSetup, *, sequence: bool = False) -> TrainedModel:
    """torch's `parallelize_module` over all ranks."""
    _check_heads(config, setup)
    _need_torch_distributed(setup)
    return TorchTensorParallel(config, setup, sequence=sequence)


def staged(config: GPTConfig, setup: TrainingSetup, *, name: str) -> TrainedModel:
    """A pipeline over all ranks, ours or torch's."""
    num_micro = setup.batch * setup.comm.size
    try:
        if name in PIPELINES:
            return OurPipeline(config, setup, name, num_micro)
        _need_torch_distributed(setup)
        return TorchPipeline(config, setup, name, num_micro)
    except ValueError as error:  # on all ranks: numbers for which the schedule is not defined
        raise CannotTakePart(str(error)) from None


MAKERS: dict[str, Callable[[GPTConfig, TrainingSetup], TrainedModel]] = {
    OURS: ours, "none": none, "ddp": ddp, "fsdp": fsdp, "deepspeed": deepspeed, TENSOR: tensor,
    SEQUENCE: partial(tensor, sequence=True), "torch-tensor": torch_tensor,
    "torch-sequence": partial(torch_tensor, sequence=True),
    **{name: partial(staged, name=name) for name in (*PIPELINES, *TORCH_SCHEDULES)},
}  # fmt: skip
"""The makers of models by their names on the command line (options.py). All are collective; CannotTakePart comes on all ranks."""


def _check_heads(config: GPTConfig, setup: TrainingSetup) -> None:
    if config.heads % setup.comm.size or config.context % setup.comm.size:
        raise CannotTakePart(
            f"{setup.comm.size} ranks cannot share {config.heads} heads and {config.context} tokens equally"
        )


def _need_torch_distributed(setup: TrainingSetup) -> None:
    """Start torch.distributed unless another peer has started it: with Gloo, or NCCL on GPUs."""
    comm, on_gpu = setup.comm, setup.device.type == "cuda"
    if on_gpu and not all(comm.all_gather_object(comm.node.size <= torch.cuda.device_count())):
        raise CannotTakePart("NCCL needs a GPU for each rank")
    if not torch.distributed.is_initialized():
        backend, device = ("nccl", setup.device) if on_gpu else ("gloo", None)
        setup.ended.enter_context(torch_group(comm, backend, device))


def _plain(config: GPTConfig, setup: TrainingSetup) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=setup.device)
    initialize(model)
    return model


def _autocast(setup: TrainingSetup) -> AbstractContextManager[Any] | None:
    return None if setup.dtype == torch.float32 else torch.autocast(setup.device.type, setup.dtype)
