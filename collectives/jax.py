"""Collectives inside `jax.jit`: all_reduce, all_gather and reduce_scatter between the ranks of a Communicator.

    from collectives import jax as cj

    @jax.jit
    def step(w, batch):
        loss, grad = jax.value_and_grad(loss_of)(w, batch)
        return w - 0.1 * cj.all_reduce(grad, comm, "avg"), cj.all_reduce(loss, comm, "avg")

Each call is a JAX primitive whose ordered host callback runs the Communicator's operation. So it works in jit, scan, while and cond,
and JAX neither drops nor reorders it. As with other collectives, all ranks call the same operations in the same order, so all ranks
must trace, differentiate and branch in the same way.

[Note: one thread] JAX has as many threads as the process has cores, and Open MPI's `mpirun` by default binds each of two ranks to one
core. So the callback must not wait for work of JAX, which may need the thread of the callback. `jax.experimental.io_callback` first
turns the operand into a jax.Array, for a long operand by a copy on another thread of JAX. So the primitive is lowered to JAX's
internal callback, which passes the operand as a NumPy array without a copy.

A jitted collective may go on after the call of the jitted function has returned. The next operation of the same thread on the same
Communicator outside of jit begins when that collective has ended, so that all ranks run both in the order of the program.

The derivatives, forward and reverse, are those of the sum of all ranks' results: `all_reduce` also sums the cotangents; the transpose
of `all_gather` is `reduce_scatter`, and vice versa. Under `jax.vmap` one operation moves the whole batch. `jax.checkpoint` cannot
recompute an ordered callback: to differentiate through it raises TypeError, as does a derivative of max, min or prod.

The operations use a separate communicator, because the callback runs on a thread of JAX while an asynchronous operation may use the
Communicator. It is made when a Communicator is first passed here, which is collective.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from math import prod
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import get_abstract_mesh

from collectives.arrays.dtypes import effective_op, number_of
from collectives.communicator.communicator import Communicator, for_callbacks
from collectives.diagnosis import stacks
from collectives.diagnosis.hangs.deadline import Standstill
from collectives.diagnosis.job import all_ranks
from collectives.progress.issued import Announced, Issues
from collectives.progress.progress import Progress
from collectives.progress.work import Queued

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(x: Any, comm: Communicator, op: str = "sum") -> jax.Array:
    """The reduction of all ranks' `x`, with the same shape and dtype, on every rank.

    `op`: sum, avg, prod, max, min; sum and avg have derivatives. TypeError or ValueError for a wrong argument, raised at tracing.
    """
    return _bind("all_reduce", x, comm, op)


def all_gather(x: Any, comm: Communicator) -> jax.Array:
    """All ranks' `x` of shape (s, ...), concatenated in order of rank to (N * s, ...), as `jax.lax.all_gather(tiled=True)`."""
    return _bind("all_gather", x, comm, "sum")


def reduce_scatter(x: Any, comm: Communicator, op: str = "sum") -> jax.Array:
    """This rank's rows of the reduction of all ranks' `x`: (N * s, ...) becomes (s, ...), as `jax.lax.psum_scatter(tiled=True)`.

    `op`: sum, avg, prod, max, min; sum and avg have derivatives. ValueError if the rows cannot be divided by the number of ranks.
    """
    return _bind("reduce_scatter", x, comm, op)


def _bind(name: str, x: Any, comm: Communicator, op: str) -> jax.Array:
    """Check the arguments, which takes time only at tracing, and issue the operation."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"{name}: comm is a {type(comm).__name__}; expected a Communicator, such as collectives.world()"
        )
    if x is None or isinstance(x, list | tuple | dict):
        raise TypeError(f"{name}: x is a {type(x).__name__}; expected one array (for a tree of them, use jax.tree.map)")
    x = jnp.asarray(x)
    effective_op(number_of(x.dtype), op)  # also for all_gather, whose derivative adds
    mesh = get_abstract_mesh()  # of the shard_map or pmap around this call
    num_devices = prod(mesh.shape[axis] for axis in mesh.manual_axes) if isinstance(x, Tracer) else len(x.devices())
    _check_devices(name, num_devices)
    if name != "all_reduce" and x.ndim == 0:
        raise ValueError(f"{name}: x is a scalar; expected rows, an array of at least one dimension")
    if name == "reduce_scatter" and x.shape[0] % comm.size:
        raise ValueError(
            f"reduce_scatter: x has shape {x.shape}; expected a number of rows that {comm.size} ranks divide evenly"
        )
    return _collective.bind(x, name=name, comm=_own(comm), op=op)


def _check_devices(name: str, num_devices: int) -> None:
    if num_devices > 1:
        raise ValueError(
            f"{name}: x is spread over {num_devices} devices, whose calls have no order; expected one device a rank: call {name} "
            "outside jax.shard_map and jax.pmap, on an array that is on one device"
        )


_own_of: WeakKeyDictionary[Communicator, Communicator] = WeakKeyDictionary()


def _own(comm: Communicator) -> Communicator:
    """The communicator that the callbacks use instead of `comm`."""
    own = _own_of.get(comm)
    if own is None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "collectives.jax needs MPI_THREAD_MULTIPLE, since JAX calls back from threads of its own, but MPI was started with "
                "a lower level: leave mpi4py.rc.thread_level at 'multiple', or use an MPI library that was built for threads"
            )
        own = _own_of[comm] = for_callbacks(comm, "jax.jit", _AfterJitted)
        if jax.default_backend() == "cpu":
            Standstill.watch(all_ranks().rank)
    return own


class _AfterJitted(Progress):
    """The Progress of a Communicator that has a communicator for JAX. Each operation calls it first, and so waits for jitted calls."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress, self.on_thread = progress, progress.on_thread

    @property
    def of_process(self) -> Progress:
        return self._progress

    def _settle(self) -> Progress:
        """Wait for the jitted collectives that this thread has called. A thread of JAX has called none.

        The flight record does not show this wait, because a computation may take any time. The record shows the collectives of the
        computation; `Standstill` detects a computation without progress. An error of the computation is suppressed here, because JAX
        would raise it at every call; it is raised where the program reads the result.
        """
        with suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()
        return self._progress

    def pending(self) -> bool:
        return self._settle().pending()

    def flush(self) -> None:
        self._settle().flush()

    def drain(self) -> None:
        self._settle().drain()

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        return self._settle().issue(operation, name, issues)

    def queue(self, operation: Callable[[], Any], announced: Announced) -> Queued:
        return self._progress.queue(operation, announced)

    def advance(self) -> None:
        self._progress.advance()

    def close(self) -> None:
        """Do nothing: the Progress of the process is closed by itself."""


stacks.name(_AfterJitted._settle, lambda _: "the wait for jitted collectives")
stacks.pass_over("jax")


# The primitive. It has one operand, x, and static parameters: the operation's `name`, `comm`, `op`.

_collective = Primitive("collectives")


def _shape(shape: tuple[int, ...], name: str, size: int) -> tuple[int, ...]:
    """The shape of the result."""
    if name == "all_reduce":
        return shape
    rows = shape[0] * size if name == "all_gather" else shape[0] // size
    return (rows, *shape[1:])


def _run(x: np.ndarray, *, name: str, comm: Communicator, op: str) -> np.ndarray:
    """Run the operation, on a thread of JAX. `x` is memory of JAX, and read-only."""
    out = np.empty(_shape(x.shape, name, comm.size), x.dtype)
    if name == "all_gather":
        return comm.all_gather(out, x)
    if name == "reduce_scatter":
        return comm.reduce_scatter(out, x, op)
    out[...] = x
    return comm.all_reduce(out, op)


# JAX keeps calls with this effect in order. The effect has no public name.
_EFFECTS = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
(_ORDERED,) = _EFFECTS


def _lower(ctx: Any, x: Any, *, name: str, comm: Communicator, op: str) -> Any:
    """Like JAX's lowering of an ordered io_callback, but without its conversion of the operand [Note: one thread]."""
    _check_devices(
        name, getattr(ctx.module_context.axis_context, "num_devices", 1)
    )  # the devices of a jit, which is not a manual axis

    def call_back(operand: Any) -> tuple[np.ndarray]:
        return (_run(operand, name=name, comm=comm, op=op),)

    results, token, _ = mlir.emit_python_callback(
        ctx, call_back, ctx.tokens_in.get(_ORDERED), [x], ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDERED: token})))
    return results


_jitted = jax.jit(_collective.bind, static_argnames=("name", "comm", "op"))


@_collective.def_impl
def _call(x: Any, **static: Any) -> jax.Array:
    """A call outside of jit. Only compiled code can have a callback, so it is compiled even within `jax.disable_jit()`."""
    with jax.disable_jit(False):
        return _jitted(x, **static)


mlir.register_lowering(_collective, _lower, cacheable=False)  # a callback belongs to one MLIR module


@_collective.def_effectful_abstract_eval
def _abstract(x: Any, *, name: str, comm: Communicator, op: str) -> Any:
    return ShapedArray(_shape(x.shape, name, comm.size), x.dtype), _EFFECTS


def _jvp(primals: Any, tangents: Any, *, name: str, comm: Communicator, op: str) -> Any:
    """The result and its tangent: sum and avg are linear, so the same operation is applied to the tangents."""
    if op not in ("sum", "avg"):
        raise TypeError(
            f"collectives.jax.{name}: op {op!r} has no derivative here; expected sum or avg. If no derivative is needed, "
            "pass jax.lax.stop_gradient(x)"
        )
    if _under_checkpoint():
        raise TypeError(
            f"collectives.jax.{name} cannot be differentiated through jax.checkpoint (jax.remat), which would call the collective "
            "again out of order; call the collective outside the checkpointed function"
        )
    (x,), (t,) = primals, tangents
    bind = functools.partial(_collective.bind, name=name, comm=comm, op=op)
    return bind(x), bind(ad.instantiate_zeros(t))


def _transpose(cotangent: Any, x: Any, *, name: str, comm: Communicator, op: str) -> list[Any]:
    if type(cotangent) is ad.Zero:  # zero on all ranks, because all ranks trace the same program
        return [ad.Zero(x.aval)]
    if name == "reduce_scatter" and op == "avg":
        cotangent, op = cotangent / comm.size, "sum"
    opposite = {"all_reduce": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[name]
    return [_collective.bind(cotangent, name=opposite, comm=comm, op=op)]


def _batch(operands: Any, axes: Any, *, name: str, comm: Communicator, op: str) -> Any:
    """One operation for the whole batch, whose axis must not be the first one, because the first axis holds the rows."""
    (x,), (axis,) = operands, axes
    if name != "all_reduce" and axis == 0:
        x, axis = jnp.moveaxis(x, 0, 1), 1
    return _collective.bind(x, name=name, comm=comm, op=op), axis


ad.primitive_jvps[_collective] = _jvp
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch


def _under_checkpoint() -> bool:
    """Whether a frame of the stack is in jax.checkpoint. JAX itself would fail later, without the function's name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == jax.checkpoint.__module__:
            return True
        frame = frame.f_back
    return False
