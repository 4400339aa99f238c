"""The peer DeepSpeed: ZeRO stage 3 (Rajbhandari et al., SC 2020) by its inventors. Needs `pip install deepspeed`.

DeepSpeed uses the torch.distributed that we have started. On CPUs it compiles a small extension for communication at its first start.
With `torch_adam` it does not compile its own optimizer.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mpitrain.tools.bench.model import LEARNING_RATE, TrainedModel, TrainingSetup


class DeepSpeed(TrainedModel):
    """DeepSpeed's engine, which has its own optimizer and gradients."""

    def __init__(self, model: nn.Module, setup: TrainingSetup) -> None:
        if setup.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # DeepSpeed reads the number of its GPU from torchrun's variable, and requires the same value in Open MPI's variable if there
        # is one. Open MPI's local ranks may have another order than ours.
        number = str(setup.comm.node.rank if setup.device.index is None else setup.device.index)
        os.environ |= dict.fromkeys({"LOCAL_RANK"} | {"OMPI_COMM_WORLD_LOCAL_RANK"} & set(os.environ), number)
        # DeepSpeed calls deprecated functions of torch.distributed; newer releases of torch warn at each call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed

            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            self._engine: Any
            self._engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=_settings(setup)
            )
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(tokens[:, :-1], tokens[:, 1:])
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def update(self) -> None:
        """The optimizer's step, and the update of the full parameters."""
        self._engine.step()

    def clear(self) -> None:
        """`update` does this."""

    def held(self) -> Iterator[torch.Tensor]:
        """Includes the small parameters, which every rank keeps whole, and DeepSpeed's second copy for mixed precision."""
        zero = self._engine.optimizer
        for param in self.model.parameters():
            yield param.data
            yield param.ds_tensor.data  # type: ignore[attr-defined]  # its part
        for name in ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat"):
            yield from (part.data for part in getattr(zero, name, ()) if torch.is_tensor(part))
        for name in ("lp_param_buffer", "grad_partitions_flat_buffer"):
            if torch.is_tensor(getattr(zero, name, None)):
                yield getattr(zero, name)
        for state in zero.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))

    def close(self) -> None:
        self._engine.destroy()


def _settings(setup: TrainingSetup) -> dict[str, Any]:
    params = {"lr": LEARNING_RATE, "torch_adam": True, "fused": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only used to count tokens
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": params},
    }
    if setup.dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    return settings
