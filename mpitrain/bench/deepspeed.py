"""The peer DeepSpeed: ZeRO stage 3 (Rajbhandari et al., SC 2020) by its inventors. Needs `pip install deepspeed`.

It finds torch.distributed started and uses it. On CPUs it compiles a small extension for communication at its first start, and with
`torch_adam` no optimizer of its own.
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

from mpitrain.bench.model import LEARNING_RATE, TrainedModel, TrainingSetup


class DeepSpeed(TrainedModel):
    """Its engine: optimizer and gradients are its own."""

    def __init__(self, model: nn.Module, setup: TrainingSetup) -> None:
        if setup.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # The number of its GPU, by torchrun's variable. It insists that Open MPI's, where there is one, says the same; that counts
        # the ranks as it placed them, which need not be in our order.
        number = str(setup.comm.node.rank if setup.device.index is None else setup.device.index)
        os.environ |= dict.fromkeys({"LOCAL_RANK"} | {"OMPI_COMM_WORLD_LOCAL_RANK"} & set(os.environ), number)
        # It calls functions of torch.distributed by names that newer releases of torch warn of, at each call.
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
        """The optimizer's step, and the new parameters to where they are needed."""
        self._engine.step()

    def clear(self) -> None:
        """Done by `update`."""

    def held(self) -> Iterator[torch.Tensor]:
        """Also the small parameters that it keeps whole on each rank, and a second copy that it makes for mixed precision."""
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
        "train_micro_batch_size_per_gpu": 1,  # it counts tokens by it, and nothing else
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": params},
    }
    if setup.dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    return settings
