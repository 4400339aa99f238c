"""collectives.jax: collectives inside jax.jit, their order and their derivatives, on every number of ranks.

Small integers in closed form of rank and size, so that expected values are exact.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.dtypes import TABLE

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


@pytest.mark.few_ranks
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


@pytest.mark.few_ranks
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


@pytest.mark.few_ranks
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


@pytest.mark.few_ranks
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


@pytest.mark.few_ranks
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


@pytest.mark.few_ranks
def test_checkpoint_says_what_to_do(comm: Communicator) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(cj.all_reduce(x, comm)).sum()

    x = jnp.ones(3)
    assert jax.jit(jax.checkpoint(f))(x) == pytest.approx(
        3 * np.sin(comm.size), rel=1e-5
    )  # not differentiated: as without
    text = r"collectives.jax.all_reduce cannot be differentiated through jax.checkpoint .* call it outside the function"
    for derive in (jax.grad(jax.checkpoint(f)), jax.jit(jax.grad(jax.remat(f))), jax.grad(jax.checkpoint(jax.jit(f)))):
        with pytest.raises(TypeError, match=text):
            derive(x)


@pytest.mark.few_ranks
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


def test_large_arrays_and_the_plain_operations_meanwhile(comm: Communicator) -> None:
    """JAX returns before its callbacks have run; the main thread goes on with the same communicator."""
    num = 1 << 20

    @jax.jit
    def steps(x: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, x: cj.all_reduce(x, comm, "avg") + 1, x)

    y = steps(jnp.full(num, comm.rank, jnp.float32))
    mine = np.ones(3)
    for _ in range(50):
        comm.barrier()
        comm.all_reduce(mine, "avg")
    assert (mine == 1).all()
    np.testing.assert_allclose(y[:: num // 8], (comm.size - 1) / 2 + 8, rtol=1e-6)  # averages of 3 ranks are rounded


def test_its_communicator_goes_with_the_one_it_serves(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2)
    total = jax.jit(lambda x: cj.all_reduce(x, part))(jnp.float32(1))
    assert total == part.size
    own = part._for_jax
    assert own is not None and own is not part
    jax.effects_barrier()
    part.free()
    assert own.mpi.handle == type(own.mpi)().handle  # MPI_COMM_NULL
