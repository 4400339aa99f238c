"""Undocumented features of torch and Python that the library needs: one function for each, with the reason.

tests/unit/mpitrain/test_torch_internals.py fails when a release changes one of them.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.nn.utils import stateless

F = TypeVar("F", bound=Callable[..., Any])


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread.

    A forward is then the recomputation of an activation checkpoint. torch has no public query.
    """
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Let the engine call `act` when the backward that runs on this thread has computed all gradients.

    FSDP2 and DistributedDataParallel use the same call. A tensor hook cannot replace it, because no tensor's hook is always the last.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


class _Given(torch.autograd.Function):
    """A number whose gradient in its inputs is given."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.grads


def backward(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward(outputs, grads)`, which checks the shapes of `grads` by sympy: an import of 0.25 s and 35 MB.

    RuntimeError if a gradient has another shape than its output.
    """
    with torch.enable_grad():
        _Given.apply(grads, *outputs).backward()


def hook_gradient(tensor: torch.Tensor, act: Callable[[torch.Tensor], Any]) -> None:
    """`tensor.register_hook(act)` for any tensor that has a gradient.

    After a write in place the node of a view is out of date, and torch makes a new one when somebody asks for it. torch's own
    `register_hook` does not ask, and crashes at the node that is missing.
    """
    _ = tensor.grad_fn
    tensor.register_hook(act)


def nodes_made() -> int:
    """How many nodes of graphs autograd has made on this thread: the number of the next one."""
    return torch._C._autograd._get_sequence_nr()


def node_number(node: Any) -> int:
    """The place of a node in the order in which its thread has made nodes. That of a leaf is larger than all."""
    number: int = node._sequence_nr()
    return number


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor whose gradient this node accumulates; None for any other node."""
    if node.next_functions or type(node).__name__ != "AccumulateGrad":
        return None
    leaf: torch.Tensor = node.variable
    return leaf


def outdate(tensors: Sequence[torch.Tensor]) -> None:
    """Let autograd refuse the backward of graphs that have saved these tensors ("modified by an inplace operation").

    Their memory has other values now, or is about to be freed.
    """
    torch.autograd.graph.increment_version(tensors)


def count_writes(tensors: Iterable[torch.Tensor]) -> int:
    """A number that grows with each write in place to one of these tensors.

    Only autograd's version counters see a write by any code. The optimizer's hook alone would miss an average or a load.
    """
    return sum(map(_version, tensors))


def writes_to_each(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor a number that grows with each write in place."""
    return tuple(map(_version, tensors))


_version = attrgetter("_version")


def storage_of(tensor: torch.Tensor) -> int:
    """A number that all views of one memory share, also while the memory is freed; 0 for a tensor without a storage of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of torch.func
        return 0


def restore(tensors: Sequence[torch.Tensor]) -> None:
    """End one `outdate`: the memory holds the saved values again. FSDP2 keeps the counter by a context manager around each write."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(tensor._version - 1 for tensor in tensors))


def with_own_counter(view: torch.Tensor) -> torch.Tensor:
    """The same memory with a separate version counter.

    Views of one tensor share a counter. So the optimizer's step on one shard would count as a write to each parameter of the buffer.
    """
    return view.data


def hooks_on(param: torch.Tensor) -> bool:
    """Whether the user gave this tensor a hook by `register_hook`."""
    return bool(param._backward_hooks)


def run_accumulation_hooks(param: torch.Tensor) -> None:
    """Run the hooks of `register_post_accumulate_grad_hook`: autograd runs them for leaves of its graph, but not for a shard."""
    hooks: Any = param._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(param)


def not_compiled(function: F) -> F:
    """Let torch's compiler neither trace nor change a function. Functions that it calls are compiled as before.

    `torch.compiler.disable` does so, too, but imports the compiler, which takes more than a second.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # else an older torch, which compiles blocks alone
        frames.set_code_exec_strategy(
            function.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        )
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "compile the blocks of a sharded model: block.compile()"  # type: ignore[attr-defined]
    return function


@not_compiled
def uncompiled_paths(paths: Sequence[str]) -> bool:
    """Let torch's compiler trace no code of files whose paths begin so; False if it is not imported yet, or has no such list.

    A call of such code ends a graph, and the functions that it calls are compiled as before. torch's `trace_rules.add` takes the names
    of modules, with all that is in a package.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if not hasattr(
        rules, "_recompile_re"
    ):  # the last name that it needs, in a module that another thread may be importing
        return False
    rules.SKIP_DIRS.extend(paths)
    rules._recompile_re()
    return True


_HERE = Path(__file__).parents[1]
_FOLDERS = [
    *(_HERE.parent / name for name in ("ckpt", "collectives")),
    *(_HERE / name for name in ("optim", "placement", "weights")),
    *(path.parent for path in sorted((_HERE / "sharding").glob("*/__init__.py"))),
]
# checkpointing.py is not among them: torch's compiler takes its checkpoints into graphs.
_FILES = [
    *(path for path in sorted((_HERE / "sharding").glob("*.py")) if path.name != "checkpointing.py"),
    *(_HERE / "torch_glue" / f"{name}.py" for name in ("torch_internals", "uncompiled")),
]
_paths = [*(f"{folder}{os.sep}" for folder in _FOLDERS), *map(str, _FILES)]
"""The code that runs around a forward, an optimizer's step or a message. Empty when the compiler knows it."""


@not_compiled
def keep_compiler_out() -> None:
    """Tell torch's compiler, if the program has imported it, to leave our code alone. Called where a compiled function comes in first.

    It would compile functions again for each parameter, and log that it has reached a limit. Layers stay compiled: those of our models,
    cut ones and those of stages.
    """
    if _paths and uncompiled_paths(_paths):
        _paths.clear()


@not_compiled
def set_compiler(compiler: Any) -> Any:
    """Let torch's compiler see the calls of Python functions on this thread, or with None not. Returns what was set before."""
    return torch._C._dynamo.eval_frame.set_eval_frame(compiler)


def in_functional_call() -> bool:
    """Whether `torch.func.functional_call` has put other tensors in the place of parameters. It looks at all frames of the thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


_FUNCTIONAL_CALL = stateless._functional_call.__code__


def without_overrides() -> AbstractContextManager[None]:
    """In the block, functions treat subclasses of Tensor as plain tensors. A `__torch_function__` calls the original function in it."""
    return torch._C.DisableTorchFunctionSubclass()
