"""The memory of a rank at the peak of a step, by layer: parameters, gradients, optimizer and activations."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.job.record.layer_ranges import layers_of
from mpitrain.job.train.hardware import memory_bytes
from mpitrain.sharding.unit.unit import units_of
from mpitrain.tools.profile.memory_kinds import KINDS, HeldMemory


class Snapshot:
    """Watches the memory of one step. Tensors that autograd saves for the backward count as activations of the layer that saves them.

    Each storage counts once, until it is freed. A layer's parameters are this rank's shards.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, process_bytes: int
    ) -> None:
        """`process_bytes`: of the process before the model was made."""
        self._process = 0 if device.type == "cuda" else process_bytes
        # Shards that are rows of the full parameters count as shards.
        self._in_place = {
            flat.storage: sum(param.shard.nbytes for param in flat.params) if flat.storage.in_place else 0
            for unit in units_of(model)
            for flat in unit.flats
        }
        self._full = 0  # full parameters when they were most
        self._model, self._optimizer, self._device = model, optimizer, device
        self._is_on, self._layer = False, _BETWEEN
        self._addresses: set[int] = set()  # of the parameters of the present layer
        self._alive: dict[int, Any] = {}  # saved storages
        self._saved, self._most = (
            Counter[str](),
            Counter[str](),
        )  # their bytes by layer: now, and when their sum was largest
        self._gradients: dict[str, int] = {}
        self._peak, self._where, self._moment = 0, _BETWEEN, _BETWEEN
        self.held = HeldMemory({}, {}, 0, _BETWEEN)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Watch the step in the block."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._is_on = True
        try:
            with saved_tensors_hooks(self._pack, _same):
                yield
        finally:
            self._is_on = False
        own = self._own()
        state = self._optimizer.state
        by_kind = {
            "parameters": {name: sum(param.nbytes for param in params) for name, params in own.items()},
            "gradients": self._gradients,
            "optimizer": {
                name: sum(x.nbytes for param in params for x in state.get(param, {}).values() if isinstance(x, torch.Tensor))
                for name, params in own.items()
            },
            "activations": dict(self._most),
        }  # fmt: skip
        names = dict.fromkeys([*own, *self._most])
        layers = {name: {kind: by_kind[kind].get(name, 0) for kind in KINDS} for name in names}
        self._look()
        known = sum(sum(kinds.values()) for kinds in layers.values()) + self._full + self._process
        others = {
            "full parameters": self._full,
            "process": self._process,
            "other": max(self._peak - known, 0),
        }
        self.held = HeldMemory(layers, others, self._peak, self._moment)

    def enter(self, layer: str, kind: str) -> None:
        """A layer begins."""
        if self._is_on:
            self._layer, self._where = layer, f"in the {kind} of {layer}"
            self._addresses = {
                param.untyped_storage().data_ptr() for param in _params(layers_of(self._model).get(layer, []))
            }
            self._look()

    def leave(self) -> None:
        """It ends."""
        if self._is_on:
            self._look()
            self._layer = self._where = _BETWEEN

    def passed(self) -> None:
        """All backwards have ended, and the gradients are complete."""
        if self._is_on:
            self._look()
            self._gradients = {
                name: sum(param.grad.nbytes for param in params if param.grad is not None)
                for name, params in self._own().items()
            }

    def _own(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each layer. One that two layers share belongs to the first."""
        seen: set[int] = set()
        found = {}
        for name, modules in layers_of(self._model).items():
            found[name] = [param for param in _params(modules) if id(param) not in seen]
            seen.update(map(id, found[name]))
        return found

    def _look(self) -> None:
        full = sum(
            storage.full_buffer.untyped_storage().nbytes() - shards for storage, shards in self._in_place.items()
        )
        self._full = max(self._full, full)
        now = memory_bytes(self._device)
        if now > self._peak:
            self._peak, self._moment = now, self._where

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        key = id(storage)
        is_known = key in self._alive and self._alive[key]() is storage
        if not is_known and storage.data_ptr() not in self._addresses:
            layer, nbytes = self._layer, storage.nbytes()

            def freed(_: Any) -> None:
                self._alive.pop(key, None)
                self._saved[layer] -= nbytes

            self._alive[key] = weakref.ref(storage, freed)
            self._saved[layer] += nbytes
            if self._saved.total() > self._most.total():
                self._most = self._saved.copy()
        return x


_BETWEEN = "between layers"


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _params(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()
