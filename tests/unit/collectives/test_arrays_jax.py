"""JAX arrays as Buffers: no copy to read them, one to write, none to hand back the new array."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.arrays.buffer import Buffer, as_numpy
from collectives.arrays.dtypes import MOVED, TABLE, DTypeError

jax = pytest.importorskip("jax", reason="JAX is not installed (pip install 'mpitrain[jax]')")
import jax.numpy as jnp  # noqa: E402

ROWS = TABLE | {name: MOVED[name] for name in ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2")}
WIDE = ("float64", "int64", "uint64", "complex128")


def address(flat: np.ndarray) -> int:
    return flat.ctypes.data


@pytest.mark.rest
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wide", [False, True])
def test_reading_takes_no_copy(name: str, wide: bool) -> None:
    if name in WIDE and not wide:
        pytest.skip("JAX makes 64-bit types only where jax_enable_x64 is set")
    with jax.enable_x64(wide):
        x = jnp.ones((2, 3), name)
        assert x.dtype == ROWS[name].numpy
        buffer = Buffer(x, "x")
        assert buffer.dtype is ROWS[name]
        assert buffer.device is None
        assert buffer.flat.shape == (6,) and (buffer.flat == 1).all()
        assert address(buffer.flat) == x.unsafe_buffer_pointer() == address(as_numpy(x))
        assert buffer.result() is x


@pytest.mark.rest
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize("wide", [False, True], ids=["x64 off", "x64 on"])
def test_writing_gives_a_new_array_without_another_copy(name: str, shape: tuple[int, ...], wide: bool) -> None:
    with jax.enable_x64(True):
        x = jnp.ones(shape, name)
    # an array made while 64-bit types were on keeps them
    with jax.enable_x64(wide):
        buffer = Buffer(x, "x", writable=True)
        assert (buffer.flat == 1).all()
        buffer.flat[...] = 0
        result = buffer.result()
        assert isinstance(result, jax.Array)
        assert (result.dtype, result.shape, result.devices()) == (x.dtype, shape, x.devices())
        assert not np.asarray(result).any()
        assert np.asarray(x).all(), "what was passed stays as it is"
        assert not result.size or result.unsafe_buffer_pointer() == address(buffer.flat)


def test_a_new_array_outlives_its_buffer() -> None:
    results = []
    for value in range(20):
        buffer = Buffer(jax.ShapeDtypeStruct((1000,), np.float32), "out", write_only=True)
        buffer.flat[...] = value
        results.append(buffer.result())
        del buffer
    assert all((np.asarray(result) == value).all() for value, result in enumerate(results))


def test_a_description_serves_where_a_result_goes_and_nowhere_else() -> None:
    shape = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    buffer = Buffer(shape, "out", writable=True, write_only=True)
    assert buffer.dtype is TABLE["bfloat16"] and buffer.flat.shape == (6,)
    for writable in (False, True):
        with pytest.raises(TypeError, match=r"x is a jax.ShapeDtypeStruct, which has no values; expected an array"):
            Buffer(shape, "x", writable=writable)


def test_traced_arrays_are_sent_to_collectives_jax() -> None:
    for options in ({}, {"writable": True}, {"write_only": True}):
        for transform in (jax.jit, jax.vmap, jax.grad):
            with pytest.raises(TypeError, match=r"x is traced by JAX .* use all_reduce, .* of collectives.jax"):
                transform(lambda x, options=options: Buffer(x, "x", **options))(
                    jnp.ones(3)[0] if transform is jax.grad else jnp.ones(3)
                )


def test_views_are_read_only() -> None:
    with pytest.raises(ValueError, match="x is read-only"):
        as_numpy(jnp.ones(3), writable=True)


def test_unknown_dtypes() -> None:
    for x in (jnp.ones(3, jnp.int4), jax.random.key(0)):
        for writable in (False, True):
            with pytest.raises(DTypeError, match=r"dtype .* is not supported; expected one of float64"):
                Buffer(x, "x", writable=writable)


SEVERAL_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from collectives.arrays.buffer import Buffer
one, two = jax.devices()
mesh = jax.make_mesh((2,), ("a",))
for spec in (jax.P("a"), jax.P()):
    spread = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, spec))
    for x in (spread, jax.ShapeDtypeStruct((4,), np.float32, sharding=spread.sharding)):
        for options in ({}, {"writable": True}, {"write_only": True}):
            if not options and x is not spread: continue
            if "writable" in options and x is not spread: continue
            try: Buffer(x, "x", **options)
            except ValueError as error: assert "x is a JAX array on 2 devices" in str(error), error
            else: raise AssertionError("was taken")
placed = jax.device_put(jnp.ones(4), two)
assert Buffer(placed, "x", writable=True).result().devices() == {two}
free = Buffer(jnp.ones(4), "x", writable=True).result()
assert (free + placed).devices() == {two}  # not tied to a device: JAX may still move it
"""


def test_arrays_on_several_devices() -> None:
    """In a process of its own: JAX takes the number of its devices when it starts."""
    run: Any = subprocess.run(
        [sys.executable, "-W", "error", "-c", SEVERAL_DEVICES],
        cwd=Path(__file__).parents[3],
        env={**__import__("os").environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
