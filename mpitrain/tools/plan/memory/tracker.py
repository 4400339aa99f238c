"""Counts the memory of tensors that have no memory, as operations make them, and until they are freed."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HEAP_BYTES = 32 << 20  # glibc returns longer pieces to the system at once; shorter pieces may stay in its heap


class Tracker(TorchDispatchMode):
    """Counts the storages that operations make, by kind, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """The bytes of each kind when their sum was largest; "heap": the part of this sum in the allocator's heap."""
        self._kinds: dict[int, str] = {}  # the kind of each living storage
        self._alive: dict[int, Any] = {}
        self._is_off = False

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor: another part of the prediction does."""
        self._alive[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def uncounted(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `make`, a new tensor that is not counted."""
        self._is_off = True
        try:
            tensor = make()
        finally:
            self._is_off = False
        self.ignore(tensor)
        return tensor

    def is_of(self, tensor: torch.Tensor, kind: str) -> None:
        """Count a tensor under `kind` from now on."""
        key = id(tensor.untyped_storage())
        if key in self._kinds:
            self.now[self._kinds[key]] -= tensor.untyped_storage().nbytes()
            self.now[kind] += tensor.untyped_storage().nbytes()
            self._kinds[key] = kind

    def add(self, kind: str, nbytes: int) -> None:
        """Count memory that no operation allocates."""
        self.now[kind] += nbytes
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        out = func(*args, **(kwargs or {}))
        for tensor in () if self._is_off else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self._note()
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._alive and self._alive[key]() is storage:
            return
        nbytes = storage.nbytes()

        def freed(_: Any) -> None:
            self._alive.pop(key, None)
            self.now[self._kinds.pop(key)] -= nbytes
            if nbytes <= HEAP_BYTES:
                self.now["heap"] -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self._kinds[key] = "activations"
        self.now["activations"] += nbytes
        if nbytes <= HEAP_BYTES:
            self.now["heap"] += nbytes

    def _note(self) -> None:
        if total(self.now) > total(self.peak):
            self.peak = self.now.copy()


def total(counts: Counter[str]) -> int:
    """The sum of all kinds."""
    return sum(nbytes for kind, nbytes in counts.items() if kind != "heap")
