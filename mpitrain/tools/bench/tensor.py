"""Tensor parallelism over all ranks, ours and torch's: each rank takes the whole batch, and has a part of each matrix."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.models import GPT, GPTConfig
from mpitrain.placement.fills import fill_
from mpitrain.tensor import communication_s, tensor_parallel
from mpitrain.tools.bench.model import LEARNING_RATE, TrainedModel, TrainingSetup
from mpitrain.weights.initial_values import initialize


class TensorParallel(TrainedModel):
    """Our `tensor_parallel`."""

    takes_whole_batch = True

    def __init__(self, config: GPTConfig, setup: TrainingSetup, *, sequence: bool) -> None:
        with torch.device("meta"):
            model = GPT(config)
        tensor_parallel(model, setup.comm, sequence=sequence)
        initialize(model)
        super().__init__(model)

    def communication_s(self) -> float | None:
        return communication_s(self.model) if next(self.model.parameters()).device.type == "cpu" else None


class TorchTensorParallel(TrainedModel):
    """torch's `parallelize_module`, by the plan of torch's tutorial on tensor parallelism, with `loss_parallel`.

    Query, key and value are three matrices, because torch cannot cut one matrix by heads.
    """

    takes_whole_batch = True

    def __init__(self, config: GPTConfig, setup: TrainingSetup, *, sequence: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        mesh = init_device_mesh(setup.device.type, (setup.comm.size,))
        with torch.device("meta"):
            self.model = GPT(config)
            for block in self.model.blocks:
                block.attn = _Attention(config)
        _parallelize(self.model, mesh, sequence=sequence)
        self.model.to_empty(device=setup.device)
        _fill(self.model)
        # A fused optimizer takes DTensors or plain tensors, not both.
        params = list(self.model.parameters())
        kinds = [[p for p in params if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
        self.optimizers = [torch.optim.AdamW(kind, lr=LEARNING_RATE, fused=True) for kind in kinds if kind]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            loss.backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def held(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            self.optimizer = optimizer
            yield from super().held()


def _parallelize(model: GPT, mesh: Any, *, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stream = Shard(1) if sequence else Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    of_model: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    of_block: dict[str, Any] = {f"attn.{name}": column for name in ("q", "k", "v")}
    of_block |= {"attn.proj": row, "mlp.fc": column, "mlp.proj": row}
    if sequence:
        enter = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        of_model["ln_f"] = SequenceParallel()
        of_block |= {"ln1": SequenceParallel(), "ln2": SequenceParallel(), "attn": enter, "mlp": enter}
    parallelize_module(model, mesh, of_model)
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)
    if sequence:
        split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(stream,), use_local_output=True)
        parallelize_module(model.blocks[0], mesh, split)


def _fill(model: GPT) -> None:
    """The values of our GPT. Those of q, k and v are the rows of its qkv."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, param in model.named_parameters():
        whole = torch.empty(param.shape)
        *path, module, kind = name.split(".")
        if module in ("q", "k", "v"):
            of_qkv = ".".join((*path, "qkv", kind))
            rows = len(whole)
            offset = (rows * ("q", "k", "v").index(module), *[0] * (whole.ndim - 1))
            fill_(
                whole, model.init_rule(of_qkv), seed=0, name=of_qkv, shape=(3 * rows, *whole.shape[1:]), offset=offset
            )
        else:
            fill_(whole, model.init_rule(name), seed=0, name=name)
        with torch.no_grad():
            if isinstance(param, DTensor):
                param.copy_(distribute_tensor(whole, param.device_mesh, param.placements))
            else:
                param.copy_(whole)


class _Attention(nn.Module):
    """The GPT's attention with one matrix each for query, key and value, as torch's plans need them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width_of_head = config.width // config.heads
        self.q, self.k, self.v, self.proj = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x: torch.Tensor, segments: None = None) -> torch.Tensor:
        b, length, _ = x.shape
        q, k, v = (f(x).view(b, length, -1, self.width_of_head).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, length, -1))
