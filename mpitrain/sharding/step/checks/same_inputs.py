"""A warning if all ranks train on the same inputs, as with a data loader that does not know the ranks.

Each rank hashes the inputs of its first training forwards, on their device: all up to the first backward that reduces, so that an
evaluation with gradients, or the first of several micro-batches, does not decide alone. The hash goes with the message that each such
backward sends anyway, `_reset_unused` in backward.py, until the ranks have compared it: mostly once. The ranks take the maximum of the
hashes and of their complements. If these are complements again, all hashes were equal. So no message is added, and the host does
not wait for a device: a hash that is still on its way goes with a later message.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpitrain.placement.stage_streams import stream_of_stages


class SameInputsWarning(RuntimeWarning):
    """All ranks have begun to train on the same inputs."""


class _OnOtherRanks(SameInputsWarning, ResourceWarning):
    """The same on all ranks but one. Python's default filters hide it, and a filter that makes an error of it acts on all ranks."""


_LENGTH = 8  # bytes of a hash


class SameInputs:
    """The comparison of one model's inputs. `says`: whether this rank's warning is the one that is shown by default.

    Stages of a pipeline that begin with the output of another stage have no inputs that are compared.
    """

    def __init__(self, model: nn.Module, *, says: bool) -> None:
        self._stream, self._says = stream_of_stages(model), says
        self._text = ""  # of the warning
        self._is_closed = False  # no more inputs are looked at
        self._has_tensors = False  # which can be compared
        self._described = xxhash.xxh3_64()  # the inputs, but tensors on other devices
        self._totals: dict[torch.device, torch.Tensor] = {}  # the hash of these tensors, on their device
        self._hashes: dict[torch.device, _OnItsWay] = {}  # the same on their way to the host
        self.is_over = False
        """Whether the ranks have compared their inputs. The same on all ranks."""

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hash the arguments of a forward, if no backward has sent the hash."""
        if self._is_closed or (self._stream is not None and kwargs.get(self._stream) is not None):
            return
        try:
            is_plain = self._hash((args, kwargs))
        except Exception:  # of a tensor without memory, as of torch.func, or of the program's own objects
            is_plain = False
        if not is_plain:
            self._is_closed, self._has_tensors = True, False

    def _hash(self, inputs: Any) -> bool:
        """Returns whether all can be compared."""
        for leaf in _leaves(inputs):
            if not isinstance(leaf, torch.Tensor):
                if " at 0x" in (text := repr(leaf)):  # an object that does not show what it has, such as a generator
                    return False
                self._described.update(f"{text}\n".encode())
                continue
            if (memory := _memory_of(leaf)) is None:
                return False
            self._has_tensors |= leaf.numel() > 0
            self._described.update(f"{leaf.dtype} {tuple(leaf.shape)}\n".encode())
            if memory.device.type == "cpu":
                self._described.update(xxhash.xxh3_64_digest(memory.numpy().data))
            else:
                total = self._totals.get(memory.device)
                value = hash_on_device(memory)
                self._totals[memory.device] = value if total is None else total * _GOLDEN + value
        self._hashes = {device: _OnItsWay(total) for device, total in self._totals.items()}
        return True

    def both_ways(self) -> list[int]:
        """What this rank sends: the hash's bytes and their complements, and whether the hash is on its way."""
        self._is_closed = True
        if not self._has_tensors:  # or some that cannot be compared: no complements, so no warning comes
            return [255] * (2 * _LENGTH) + [0]
        if not all(each.is_there for each in self._hashes.values()):
            return [0] * (2 * _LENGTH) + [1]
        whole = self._described.copy()
        whole.update("".join(str(each.values.tolist()) for each in self._hashes.values()).encode())
        mine = whole.digest()
        return [*mine, *(255 - byte for byte in mine), 0]

    def check(self, most: list[int], num_ranks: int) -> None:
        """Compare the hashes. `most`: the maximum of all ranks' `both_ways`."""
        highest, lowest, is_late = most[:_LENGTH], most[_LENGTH:-1], most[-1]
        if is_late:
            return
        self.is_over = True
        self._totals.clear()
        self._hashes.clear()
        if all(high + low == 255 for high, low in zip(highest, lowest, strict=True)):
            self._text = (
                f"all {num_ranks} ranks train on the same inputs, so each step computes the same {num_ranks} times; give each rank "
                "other samples: DataLoader(..., sampler=DistributedSampler(dataset, comm.size, comm.rank)) of torch, or "
                "mpitrain.data.batches, where comm has the ranks with different data"
            )

    def warn(self) -> None:
        """Warn, at the line of the program that called torch or the library, if the inputs were the same."""
        if not self._text:
            return
        libraries = tuple(str(Path(str(sys.modules[name].__file__)).parent) for name in ("torch", "mpitrain"))
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame, level = frame.f_back, level + 1
        warnings.warn(self._text, SameInputsWarning if self._says else _OnOtherRanks, stacklevel=level)


@contextmanager
def not_compared() -> Iterator[None]:
    """In the block nothing is said: the program divides its data itself, and the samples of few data may be equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SameInputsWarning)
        yield


class _OnItsWay:
    """Numbers of a device, on their way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: Any = None
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self.values = values.cpu()

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())


_DEEPEST = 3  # objects within objects


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors, numbers and texts in the arguments of a forward, also in mappings, dataclasses and other objects.

    An object that cannot be looked into is yielded itself.
    """
    left, seen = [(value, 0)], set[int]()
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor | int | float | complex | str | bytes | None):
            yield value
        elif isinstance(value, np.ndarray | np.generic):
            yield value.tobytes()
        elif id(value) not in seen and not isinstance(value, nn.Module | ModuleType | type):
            seen.add(id(value))
            if isinstance(value, Mapping):
                left += [(each, depth) for pair in value.items() for each in pair]
            elif isinstance(value, list | tuple):
                left += [(each, depth) for each in value]
            elif isinstance(value, set | frozenset):
                left += [(each, depth) for each in sorted(value, key=repr)]
            elif is_dataclass(value):
                left += [(getattr(value, field.name, None), depth) for field in fields(value)]
            elif isinstance(value, torch.Generator):
                yield value.get_state()
            elif depth < _DEEPEST and hasattr(value, "__dict__"):
                left += [(each, depth + 1) for each in vars(value).values()]
            else:
                yield value


@torch.no_grad()
def _memory_of(x: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor, 1-D; None for one without plain memory, such as a sparse or a nested one."""
    if x.layout != torch.strided or x.is_meta or x.is_quantized or is_traceable_wrapper_subclass(x):
        return None
    plain = x.detach().as_subclass(torch.Tensor)
    return plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


_BLOCK = 1 << 20  # words of 8 bytes that are hashed at once: temporary memory of 24 MiB
_GOLDEN, _MIX, _MIX_AGAIN = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd, as of SplitMix64


@torch.no_grad()
def hash_on_device(memory: torch.Tensor) -> torch.Tensor:
    """A number (int64, on the same device) that depends on each bit of `memory` (1-D, uint8) and on its place.

    It adds up the mixed words of 8 bytes: sums of integers do not depend on the order in which a device adds.
    """
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for begin in range(0, memory.numel(), 8 * _BLOCK):
        part = memory[begin : begin + 8 * _BLOCK]
        words = torch.zeros(-(-part.numel() // 8), dtype=torch.int64, device=memory.device)
        words.view(torch.uint8)[: part.numel()] = part
        words += torch.arange(begin // 8 + 1, begin // 8 + 1 + len(words), device=memory.device).mul_(_GOLDEN)
        for shift, factor in ((30, _MIX), (27, _MIX_AGAIN)):
            words = words.bitwise_xor_(words >> shift).mul_(factor)
        total += words.bitwise_xor_(words >> 31).sum()
    return total
