"""Checkpoints as JAX arrays: `Checkpoint.to_jax`. Only this module of `ckpt` imports JAX."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Sharding

if TYPE_CHECKING:
    from ckpt.reading.entry import TensorEntry


def tree_of(entries: Mapping[str, "TensorEntry"], sharding: Any, *, verify: bool) -> dict[str, Any]:
    """Nested dicts, by the parts of the names, of JAX arrays. See `Checkpoint.to_jax`."""
    placed = {
        name: _sharding_of(entry, sharding) for name, entry in entries.items()
    }  # errors before the first byte is read
    tree: dict[str, Any] = {}
    for name, entry in entries.items():
        *groups, last = name.split("/")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = _array(entry, placed[name], verify)
    return tree


def _sharding_of(entry: "TensorEntry", given: Any) -> Sharding | None:
    """The sharding of one tensor from `given`: one for all tensors, a function, or nested dicts, where one may stand for a group."""
    if callable(given) and not isinstance(given, Sharding):
        given = given(entry)
    else:
        for part in entry.name.split("/"):
            if not isinstance(given, Mapping):
                break
            if part not in given:
                raise ValueError(
                    f"sharding has no entry for {entry.name!r}: {part!r} is missing, there are {', '.join(map(repr, given))}; "
                    "expected one for each tensor or group, or None where JAX may choose (only= leaves tensors out)"
                )
            given = given[part]
    if given is not None and not isinstance(given, Sharding):
        raise TypeError(
            f"the sharding of {entry.name!r} is a {type(given).__name__}; expected a jax.sharding.Sharding or None"
        )
    if given is not None:
        try:
            given.shard_shape(entry.shape)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"tensor {entry.name!r} of shape {entry.shape} cannot be cut by {given}: {error}"
            ) from None
    return given


def _array(entry: "TensorEntry", sharding: Sharding | None, verify: bool) -> jax.Array:
    wide = entry.dtype.itemsize >= 8  # made with JAX's 64-bit types turned on, else JAX would cut it to 32 bits
    with jax.enable_x64(True) if wide else nullcontext():
        if sharding is None:
            return jax.device_put(entry.read(verify=verify))
        return jax.make_array_from_callback(
            entry.shape, sharding, lambda where: entry.read(where, verify=verify), dtype=entry.dtype
        )
