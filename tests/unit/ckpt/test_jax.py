"""Checkpoints as JAX arrays, on four devices of one CPU: in processes of their own, for JAX counts its devices once."""

import os
import subprocess
import sys
from pathlib import Path

import ckpt

START = """
import sys
import ml_dtypes
import numpy as np
import ckpt
import ckpt.reading.reader
import pytest

folder = sys.argv[1]
tensors = {
    "model/w": np.arange(64, dtype="f4").reshape(8, 8),
    "model/half": np.arange(16).astype(ml_dtypes.bfloat16).reshape(8, 2),
    "optimizer/m": np.arange(64.0).reshape(8, 8),
    "optimizer/truth": np.arange(8) % 3 == 0,
    "empty": np.zeros((0, 4), "i4"),
    "step": np.array(1 << 40),
}
path = ckpt.save(folder + "/c", tensors, comm=None)
checkpoint = ckpt.open(path)
assert "jax" not in sys.modules

def flat(tree, prefix=""):
    for name, node in tree.items():
        yield from flat(node, f"{prefix}{name}/") if isinstance(node, dict) else [(prefix + name, node)]

def assert_holds(tree, names):
    found = dict(flat(tree))
    assert found.keys() == set(names)
    for name, array in found.items():
        assert isinstance(array, jax.Array)
        back, right = np.asarray(array), tensors[name]
        assert (back.dtype, back.shape, back.tobytes()) == (right.dtype, right.shape, right.tobytes()), name
"""

WHOLE = """
tree = checkpoint.to_jax()
import jax
assert_holds(tree, tensors)
assert not jax.config.jax_enable_x64  # and yet
assert tree["step"].dtype == "int64" and tree["optimizer"]["m"].dtype == "float64"
assert_holds(checkpoint.to_jax(only="model/*"), ["model/w", "model/half"])
with pytest.raises(ValueError, match="no tensor's name matches 'x'"):
    checkpoint.to_jax(only="x")
"""

SHARDED = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
whole, rows, both = (NamedSharding(mesh, spec) for spec in (P(), P(("x", "y")), P("x", "y")))
assert len(jax.devices()) == 4

assert_holds(checkpoint.to_jax(whole), tensors)
tree = checkpoint.to_jax(rows, only=["model/*", "optimizer/*"])
assert_holds(tree, [name for name in tensors if "/" in name])
assert tree["model"]["w"].sharding == rows

# by a function, and by nested dicts, which may end early
by_name = checkpoint.to_jax(lambda entry: both if len(entry.shape) == 2 and entry.shape[0] else None)
assert_holds(by_name, tensors)
assert by_name["model"]["half"].sharding == both
tree = checkpoint.to_jax({"model": {"w": both, "half": rows}, "optimizer": rows, "empty": None, "step": whole})
assert_holds(tree, tensors)
assert [shard.data.shape for shard in tree["model"]["w"].addressable_shards] == [(4, 4)] * 4
assert tree["optimizer"]["truth"].sharding == rows and tree["model"]["w"].sharding == both

# each device's slice alone: of the matrix the rows of each, and no byte twice
read = []
plain = ckpt.reading.reader.Reader.fill
def fill(self, target, tensor, box):
    read.append(box)
    plain(self, target, tensor, box)
ckpt.reading.reader.Reader.fill = fill
checkpoint.to_jax(rows, only="model/w")
assert sorted(read, key=str) == [ckpt.Box((row, 0), (2, 8)) for row in (0, 2, 4, 6)], read
read.clear()

for wrong, error, message in (
    ({"model": rows}, ValueError, "sharding has no entry for 'empty': 'empty' is missing, there are 'model'"),
    (P("x"), TypeError, "; expected a jax.sharding.Sharding"),
    (lambda entry: 3, TypeError, "the sharding of 'empty' is a int"),
    (both, ValueError, "tensor 'optimizer/truth' of shape .* cannot be cut by"),
    (NamedSharding(mesh, P(None, ("x", "y"))), ValueError, "tensor 'model/half' of shape .* cannot be cut by"),
):
    only = None if error is TypeError or isinstance(wrong, dict) else ["model/*", "optimizer/truth"]
    with pytest.raises(error, match=message):
        checkpoint.to_jax(wrong, only=only)
assert not read
"""


def run(script: str, folder: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(ckpt.__file__).parents[1]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-W", "error", "-c", START + script, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_whole_arrays_keep_their_dtypes(tmp_path: Path) -> None:
    run(WHOLE, tmp_path)


def test_each_device_gets_its_slice(tmp_path: Path) -> None:
    run(SHARDED, tmp_path)
