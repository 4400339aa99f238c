"""collectives.jax: collectives inside jax.jit, their order and their derivatives, on every number of ranks.

Small integers in closed form of rank and size, so that expected values are exact.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays.dtypes import TABLE
from collectives.diagnosis import record
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread

jax = pytest.importorskip("jax", reason="JAX is not installed (pip install 'mpitrain[jax]')")
import jax.numpy as jnp  # noqa: E402

from collectives import jax as cj  # noqa: E402


def rows(size: int, rank: int, width: int = 3) -> np.ndarray:
    """What `rank` contributes: (size, width)."""
    return (np.arange(size * width) % 7 + rank + 1).reshape(size, width).astype(np.float32)


def everyones(comm: Communicator, size: int) -> np.ndarray:
    """(N, size, width)"""
    return np.stack([rows(size, rank) for rank in range(comm.size)])


def weights(size: int) -> np.ndarray:
    """Cotangents that differ from element to element; (size, 3)."""
    return (np.arange(size * 3) % 5 - 1).reshape(size, 3).astype(np.float32)


REDUCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.sum(0) / np.float32(len(x)),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
}


@pytest.mark.rest
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values(comm: Communicator, wrap: Any) -> None:
    n, rank = comm.size, comm.rank
    for size in (0, 1, 5):
        x, all_x = rows(size * n, rank), everyones(comm, size * n)
        for op, reduce in REDUCE.items():
            total = wrap(lambda x, op=op: cj.all_reduce(x, comm, op))(x)
            np.testing.assert_array_equal(total, reduce(all_x))
            part = wrap(lambda x, op=op: cj.reduce_scatter(x, comm, op))(x)
            np.testing.assert_array_equal(part, reduce(all_x)[rank * size :][:size])
        whole = wrap(lambda x: cj.all_gather(x, comm))(x)
        np.testing.assert_array_equal(whole, all_x.reshape(-1, 3))
    assert wrap(lambda x: cj.all_reduce(x, comm))(jnp.float32(rank)) == n * (n - 1) / 2


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_every_dtype_with_and_without_64_bits(comm: Communicator) -> None:
    for wide in (False, True):
        with jax.enable_x64(wide):
            for name, row in TABLE.items():
                if not wide and name not in ("float32", "bfloat16", "int32", "bool"):
                    continue
                x = jnp.arange(4).astype(name)
                y = jax.jit(lambda x: cj.all_gather(cj.all_reduce(x, comm), comm))(x)
                total = np.arange(4) > 0 if name == "bool" else np.arange(4) * comm.size
                assert y.dtype == x.dtype
                np.testing.assert_array_equal(np.asarray(y), np.tile(total.astype(row.numpy), comm.size))


def test_calls_keep_their_order(comm: Communicator) -> None:
    """Also those whose result nobody uses, and the same call twice; a size that changes would betray a wrong order."""

    @jax.jit
    def f(x: Any) -> Any:
        cj.all_reduce(jnp.ones(7), comm)
        y = cj.all_reduce(x, comm)
        cj.all_gather(jnp.ones(3), comm)
        return cj.all_reduce(y, comm), cj.all_gather(y[:1], comm)

    for _ in range(3):
        total, gathered = f(jnp.arange(4.0))
        np.testing.assert_array_equal(total, np.arange(4) * comm.size**2)
        np.testing.assert_array_equal(gathered, np.zeros(comm.size))


def test_control_flow(comm: Communicator) -> None:
    n = comm.size

    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (cj.all_reduce(c, comm), cj.all_reduce(c[:1], comm, "max")), x, length=3)

    total, first = jax.jit(scan)(jnp.arange(3.0) + 1)
    np.testing.assert_array_equal(total, (np.arange(3) + 1) * n**3)
    np.testing.assert_array_equal(first[:, 0], [1, n, n**2])

    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, cj.all_reduce(c[1], comm)), (0, x))[1]

    np.testing.assert_array_equal(jax.jit(loop)(jnp.arange(3.0)), np.arange(3) * n**4)

    def branch(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda x: cj.all_reduce(x, comm), lambda x: 2 * cj.all_reduce(x, comm, "avg"), x)

    np.testing.assert_array_equal(jax.jit(branch)(jnp.ones(3)), np.full(3, n))
    np.testing.assert_array_equal(jax.jit(branch)(-jnp.ones(3)), np.full(3, -2))


@pytest.mark.rest
@pytest.mark.ranks(1, 2, 3)
def test_gradients_are_those_of_the_sum_of_all_ranks_results(comm: Communicator) -> None:
    """Rank r's result weighs the output with (r + 1) w."""
    n, rank, s = comm.size, comm.rank, 2
    everyone = n * (n + 1) / 2  # the sum of r + 1

    def gradient(f: Callable[[Any], Any], x: np.ndarray, w: np.ndarray) -> np.ndarray:
        def loss(x: Any) -> Any:
            return ((rank + 1) * w * f(x)).sum()

        grads = [jax.jit(jax.grad(loss))(x), jax.grad(loss)(x)]
        assert all((g == grads[0]).all() for g in grads)
        return grads[0]

    w = weights(s)
    grad = gradient(lambda x: cj.all_reduce(x, comm), rows(s, rank), w)
    np.testing.assert_array_equal(grad, everyone * w)
    grad = gradient(lambda x: cj.all_reduce(x, comm, "avg"), rows(s, rank), w)
    np.testing.assert_allclose(grad, everyone * w / n, rtol=1e-6)  # fp32: rounded once more on the way
    w = weights(s * n)
    grad = gradient(lambda x: cj.all_gather(x, comm), rows(s, rank), w)
    np.testing.assert_array_equal(grad, everyone * w[rank * s :][:s])
    whole = np.concatenate([(r + 1) * weights(s) for r in range(n)])
    grad = gradient(lambda x: cj.reduce_scatter(x, comm), rows(s * n, rank), weights(s))
    np.testing.assert_array_equal(grad, whole)
    grad = gradient(lambda x: cj.reduce_scatter(x, comm, "avg"), rows(s * n, rank), weights(s))
    np.testing.assert_allclose(grad, whole / n, rtol=1e-6)


@pytest.mark.ranks(1, 2)
def test_gradients_against_finite_differences(comm: Communicator) -> None:
    """Of the sum of all ranks' losses, by this rank's x alone: the others hold still while one rank after the other moves."""
    n, rank = comm.size, comm.rank

    def loss(x: Any) -> Any:
        y = jnp.sin(cj.all_reduce(x, comm) * (rank + 1))
        y = cj.all_gather(jnp.cos(cj.reduce_scatter(jnp.tile(y, n), comm, "avg") + x), comm)
        return (y**2).sum() * (rank + 1)

    with jax.enable_x64(True):
        x = np.array([0.3, -0.7, 1.1]) * (rank + 1)
        grad = jax.jit(jax.grad(loss))(x)
        total = jax.jit(lambda x: cj.all_reduce(loss(x), comm))
        slopes = np.empty((n, 3))
        for mover in range(n):
            for i in range(3):
                step = np.eye(3)[i] * 1e-6 * (rank == mover)
                slopes[mover, i] = (total(x + step) - total(x - step)) / 2e-6
    # central differences err by step^2 and by what cancels, 1e-16 / step
    np.testing.assert_allclose(grad, slopes[rank], rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(1, 2)
def test_derivatives_in_loops_and_of_higher_order(comm: Communicator) -> None:
    n = comm.size

    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (cj.all_reduce(c, comm), None), x, length=3)[0].sum()

    def branch(x: Any) -> Any:
        return jax.lax.cond(True, lambda x: cj.all_reduce(x, comm), lambda x: x, x).sum()

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(scan))(x), np.full(3, n**3))
    np.testing.assert_array_equal(jax.jit(jax.grad(branch))(x), np.full(3, n))

    def cube(x: Any) -> Any:
        return (cj.all_reduce(x, comm) ** 3).sum()

    # The sum of N equal results, each of (N x)^3 where all ranks move: 6 N (N x) N by the two derivatives of N
    np.testing.assert_array_equal(jax.jit(jax.hessian(cube))(x), np.diag(6 * n**3 * np.arange(3)))


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_forward_mode_and_vmap(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    x, t = rows(2 * n, rank), rows(2 * n, rank + 1)
    for name, f in {
        "all_reduce": lambda x: cj.all_reduce(x, comm),
        "all_gather": lambda x: cj.all_gather(x, comm),
        "reduce_scatter": lambda x: cj.reduce_scatter(x, comm),
    }.items():
        value, tangent = jax.jit(lambda x, t, f=f: jax.jvp(f, (x,), (t,)))(x, t)
        np.testing.assert_array_equal(value, f(x))
        np.testing.assert_array_equal(tangent, f(t), err_msg=name)
        for axis in (0, 1):
            many = np.stack([x, t, x + t, x - t], axis)
            got = jax.jit(jax.vmap(f, in_axes=axis, out_axes=axis))(many)
            expected = np.stack([f(np.take(many, i, axis)) for i in range(4)], axis)
            np.testing.assert_array_equal(got, expected, err_msg=f"{name} over axis {axis}")
        grads = jax.vmap(jax.grad(lambda x, f=f: (f(x) ** 2).sum()))(np.stack([x, t]))
        np.testing.assert_array_equal(grads[1], jax.grad(lambda x, f=f: (f(x) ** 2).sum())(t))


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_what_has_no_derivative_says_so_when_traced(comm: Communicator) -> None:
    x = jnp.ones(2 * comm.size)
    for op in ("max", "min", "prod"):
        for name in ("all_reduce", "reduce_scatter"):

            def f(x: Any, name: str = name, op: str = op) -> Any:
                return getattr(cj, name)(x, comm, op).sum()

            text = rf"collectives.jax.{name}: op '{op}' has no derivative here; expected sum or avg"
            for derive in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
                with pytest.raises(TypeError, match=text):
                    derive(f)(x)
            # and where none is asked for, none is needed
            np.testing.assert_array_equal(
                jax.grad(lambda x, f=f: f(jax.lax.stop_gradient(x)) + x.sum())(x), np.ones(len(x))
            )


@pytest.mark.ranks(1, 2)
def test_checkpoint_says_what_to_do(comm: Communicator) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(cj.all_reduce(x, comm)).sum()

    x = jnp.ones(3)
    assert jax.jit(jax.checkpoint(f))(x) == pytest.approx(
        3 * np.sin(comm.size), rel=1e-5
    )  # not differentiated: as without
    text = r"collectives.jax.all_reduce cannot be differentiated through jax.checkpoint .* call the collective outside the checkpointed"
    for derive in (jax.grad(jax.checkpoint(f)), jax.jit(jax.grad(jax.remat(f))), jax.grad(jax.checkpoint(jax.jit(f)))):
        with pytest.raises(TypeError, match=text):
            derive(x)


@pytest.mark.ranks(1, 2)
def test_wrong_arguments(comm: Communicator) -> None:
    x, n = jnp.ones(3), comm.size
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "all_reduce: comm is a Intracomm; expected a Communicator", lambda: cj.all_reduce(x, comm.mpi)),
        (TypeError, "all_gather: x is a list; expected one array .* jax.tree.map", lambda: cj.all_gather([x, x], comm)),
        (ValueError, "op 'mean' is unknown; expected one of avg", lambda: cj.all_reduce(x, comm, "mean")),
        (TypeError, "op 'avg' is not defined for int32", lambda: cj.all_reduce(x.astype("int32"), comm, "avg")),
        (TypeError, "dtype complex64 is not supported", lambda: cj.all_reduce(x.astype("complex64"), comm)),
        (ValueError, "all_gather: x is a scalar; expected rows", lambda: cj.all_gather(1.0, comm)),
        (ValueError, "reduce_scatter: x is a scalar; expected rows", lambda: cj.reduce_scatter(1.0, comm)),
    ]
    if n > 1:
        wrong = jnp.ones((n + 1, 2))
        text = rf"reduce_scatter: x has shape \({n + 1}, 2\); expected a number of rows that {n} ranks divide evenly"
        cases.append((ValueError, text, lambda: cj.reduce_scatter(wrong, comm)))
    for kind, text, call in cases:
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(kind, match=text):
                wrap(call)()


def test_what_follows_a_jitted_operation_begins_when_that_has_ended(comm: Communicator) -> None:
    """JAX returns before its callbacks have run; the ranks come to both in the order of the program."""
    part, num = comm.split(0), 1 << 18

    @jax.jit
    def steps(x: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, x: cj.all_reduce(x, part, "avg") + 1, x)

    x, mine = np.full(num, part.rank, np.float32), np.ones(3)  # JAX has to copy x first, so the call returns
    out = np.empty(3 * part.size)
    follows: dict[str, Callable[[], Any]] = {
        "barrier": part.barrier,
        "all_reduce": lambda: part.all_reduce(mine, "avg"),  # with a plan from the second time on
        "all_gather": lambda: part.all_gather(out, mine, async_op=True).wait(),
        "all_gather_object": lambda: part.all_gather_object(1),
        "split": lambda: part.split(None),
    }
    for _ in range(3):
        for name, follow in follows.items():
            y = steps(x)
            before = jitted(part)
            follow()
            ended = [each for each in record.last_operations() if each.log is log_of_jitted(part)]
            (then,) = [
                each for each in record.last_operations() if each.log is not log_of_jitted(part) and each.name == name
            ][-1:]
            assert all(each.state == record.ENDED for each in ended) and jitted(part) - before <= 8
            assert then.begun >= max(each.ended for each in ended), name
            np.testing.assert_allclose(
                y[:: num // 8], (part.size - 1) / 2 + 8, rtol=1e-6
            )  # averages of 3 ranks are rounded
    assert (mine == 1).all()
    part.free()


def test_an_error_of_a_computation_is_raised_where_its_result_is_read(comm: Communicator) -> None:
    """And not by every later operation of the communicator."""
    part = comm.split(0)

    def fail(x: Any) -> Any:
        raise ValueError("of the program")

    @jax.jit
    def f(x: Any) -> Any:
        y = jax.lax.fori_loop(0, 8, lambda _, x: cj.all_reduce(x, part, "avg"), x)
        return jax.experimental.io_callback(fail, jax.ShapeDtypeStruct((), y.dtype), y[0])

    def use() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # where JAX carries it out before the call returns
            f(np.ones(1 << 18, np.float32))
        part.barrier()
        assert part.all_reduce(np.ones(3))[0] == part.size

    with ThreadPoolExecutor(1) as pool:  # JAX keeps such an error for all that the thread calls in order
        pool.submit(use).result()
    part.free()


def test_where_jit_is_disabled(comm: Communicator) -> None:
    """As people do to debug."""
    with jax.disable_jit():
        x = np.ones(3, np.float32)
        assert (jax.jit(lambda x: cj.all_reduce(x, comm))(x) == comm.size).all()
        assert (jax.grad(lambda x: cj.all_reduce(x * x, comm).sum())(x) == 2 * comm.size).all()


def test_the_wait_for_jitted_operations_is_no_operation(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither fills the flight record nor bars another thread, whose messages may go beside collectives."""
    part = comm.split(0)
    x, came = np.ones(3), np.empty(3)
    jax.jit(lambda x: cj.all_reduce(x, part))(x).block_until_ready()
    before = max(each.number for each in record.last_operations())
    for _ in range(3):
        part.all_reduce(x)
    assert max(each.number for each in record.last_operations()) == before + 3

    waits, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
            go_on.wait(20)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(jax, "effects_barrier", wait)
        barrier = pool.submit(part.barrier)
        waits.wait(20)
        try:
            sent = part.isend(x, (part.rank + 1) % part.size)
            part.irecv(came, (part.rank - 1) % part.size).wait()
            sent.wait()
        finally:
            go_on.set()
        barrier.result()
    assert (came == x).all()
    part.free()


def log_of_jitted(comm: Communicator) -> record.Log:
    """The record of the jitted operations of `comm`."""
    return cj._own_of[comm]._recorder.log


def jitted(comm: Communicator) -> int:
    """How many jitted operations of `comm` this rank has entered."""
    return log_of_jitted(comm).sequence


@pytest.mark.rest
def test_jitted_operations_beside_asynchronous_ones(comm: Communicator) -> None:
    """These are the caller's thread's or the progress thread's: a thread of JAX never carries one out."""
    for progress in (Deferred(), Thread()):
        part = Communicator(comm.mpi.Dup(), progress=progress)
        f = jax.jit(lambda x, part=part: cj.all_reduce(x, part) + cj.all_reduce(2 * x, part))
        for number in range(10):
            size = 1000 * (number % 3 + 1)
            one, other, x = np.ones(size), np.ones(size + 1), np.ones(100 * size, np.float32)
            work = part.all_reduce(one, async_op=True)
            y = f(x)
            if number % 2:
                part.all_reduce(other)
                work.wait()
            else:
                work.wait()
                part.all_reduce(other)
            assert (one == part.size).all() and (other == part.size).all()
            np.testing.assert_array_equal(y, np.full(100 * size, 3 * part.size))
        part.free()
        progress.close()


def test_its_communicator_goes_with_the_one_it_serves(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2)
    total = jax.jit(lambda x: cj.all_reduce(x, part))(jnp.float32(1))
    assert total == part.size
    own = cj._own_of.get(part)
    assert own is not None and own is not part
    jax.effects_barrier()
    part.free()
    assert own.mpi.handle == type(own.mpi)().handle  # MPI_COMM_NULL
