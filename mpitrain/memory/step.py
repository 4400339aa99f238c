"""The peak memory of a training step, counted with tensors that have no memory.

Fake tensors go through the same operations of forward and backward as real tensors on the CPU, and are freed at the same points. So the
count is exact, except for the temporary memory of kernels and the free memory that the allocator keeps.
"""

import weakref
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.environment import switch
from mpitrain.config import Config
from mpitrain.models import LanguageModel, TransformerConfig, build
from mpitrain.sharding import checkpoint_activations

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

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor: another part of the prediction does."""
        self._alive[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

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
        for tensor in tree_leaves(out):
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


def units_of(model: LanguageModel) -> list[list[nn.Parameter]]:
    """The parameters of each unit that `make_model` makes: the blocks, then the rest."""
    units = [list(block.parameters()) for block in model.blocks]
    inside = {id(param) for unit in units for param in unit}
    return [*units, [param for param in model.parameters() if id(param) not in inside]]


def takes_grads_over(config: Config, num_ranks: int) -> bool:
    """Whether the full gradients become the gradients of the shards without a copy: only with one rank, in fp32."""
    return num_ranks == 1 and config.parallel.param_dtype == config.parallel.reduce_dtype == "float32"


def measure(config: Config, num_ranks: int, held: list[int], *, gathered: bool) -> Counter[str]:
    """The peak of a step, or of an evaluation if it needs more, on one of `num_ranks` ranks: "activations", "gradients",
    "full parameters" if they are `gathered`, "heap". `held`: the bytes of the shards' gradients, in the order of `units_of`."""
    micro_batch = config.train.batch // num_ranks // config.train.accumulate
    trained = _run(config, micro_batch, num_ranks, held, gathered=gathered, train=True)
    if not config.train.eval_batches:
        return trained
    evaluated = _run(config, config.train.batch // num_ranks, num_ranks, held, gathered=gathered, train=False)
    return max(trained, evaluated, key=total)


def _run(config: Config, rows: int, num_ranks: int, held: list[int], *, gathered: bool, train: bool) -> Counter[str]:
    sizes = config.model.resolve()
    with FakeTensorMode():
        model = _fake_model(sizes, getattr(torch, config.parallel.param_dtype))
        tracker = Tracker()
        for param in model.parameters():
            tracker.ignore(param)
        if (what := config.parallel.checkpoint_activations) != "none":
            checkpoint_activations(model, model.blocks, what=what)
        if gathered:
            _gather(model, tracker, again=config.parallel.reshard_after_forward)
        if train:
            _reduce(model, tracker, config, num_ranks, held)
        if not train or (config.train.accumulate > 1 and not takes_grads_over(config, num_ranks)):
            tracker.add("gradients", sum(held))  # until the next step begins
        with tracker, torch.set_grad_enabled(train):
            tokens = torch.empty(rows, sizes.context + 1, dtype=torch.int64)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            if train:
                loss.backward()
    return tracker.peak


def _fake_model(sizes: TransformerConfig, dtype: torch.dtype) -> LanguageModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the parameters of a fake model cannot be cast later
    try:
        return build(sizes)
    finally:
        torch.set_default_dtype(before)


def _gather(model: LanguageModel, tracker: Tracker, *, again: bool) -> None:
    """Count full parameters as `Gathered` in storage.py holds them. `again`: a block frees them after its forward, and its backward
    fills them again. With a progress thread the next block is prefetched: see `prefetch_bytes` of fully_shard.
    """
    *blocks, root = [sum(param.nbytes for param in unit) for unit in units_of(model)]
    tracker.add("full parameters", root)
    ahead = switch("MPITRAIN_PROGRESS_THREAD") is True
    full: set[int] = set()

    def fill(*_: Any, index: int, then: int) -> None:
        for each in (index, then) if ahead and 0 <= then < len(blocks) else (index,):
            if each not in full:
                full.add(each)
                tracker.add("full parameters", blocks[each])

    def free(*_: Any, index: int) -> None:
        full.remove(index)
        tracker.add("full parameters", -blocks[index])

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(partial(fill, index=index, then=index + 1))
        if again:
            block.register_forward_hook(partial(free, index=index))
            block.register_full_backward_pre_hook(partial(fill, index=index, then=index - 1))
        block.register_full_backward_hook(partial(free, index=index))


def _reduce(model: LanguageModel, tracker: Tracker, config: Config, num_ranks: int, held: list[int]) -> None:
    """Free full gradients when they are reduced, and count the gradients of the shards from then on: see [Note: order] and
    [Note: gradient buffers] in sharding/step/reducer.py."""
    is_first = config.train.accumulate == 1  # later micro-batches add to the gradients of the first
    reduced = [*reversed(held[:-1]), held[-1]]
    *blocks, root = units_of(model)
    order = [*reversed(blocks), root]
    missing = [len(unit) for unit in order]
    adopted = takes_grads_over(config, num_ranks)
    at = 0  # in the order: the unit to reduce next

    def on_grad(param: torch.Tensor, index: int) -> None:
        nonlocal at
        assert param.grad is not None
        tracker.is_of(param.grad, "gradients")
        missing[index] -= 1
        if adopted:
            return
        if index == at and num_ranks > 1:
            param.grad = None  # moved to a gradient buffer
        while at < len(order) and not missing[at] and config.parallel.stage != 1:
            if is_first:
                tracker.add("gradients", reduced[at])
            for done in order[at]:
                done.grad = None
            at += 1

    for index, unit in enumerate(order):
        for param in unit:
            param.register_post_accumulate_grad_hook(lambda p, i=index: on_grad(p, i))
