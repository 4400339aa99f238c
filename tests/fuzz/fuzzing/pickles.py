"""Pickles that torch's unpickler follows to their end: tensors with any sizes, strides and storages, and calls with any arguments."""

import struct
from collections.abc import Callable
from random import Random

from torch._weights_only_unpickler import _get_allowed_globals

_GLOBALS = sorted(_get_allowed_globals())
_CALLABLE = [
    name for name in _GLOBALS if ("Storage" not in name and not name.startswith("torch.")) or "_rebuild" in name
]
_STORAGES = ("FloatStorage", "HalfStorage", "LongStorage", "ByteStorage", "BoolStorage", "ComplexFloatStorage")
_NUMBERS = (0, 1, 2, 3, 4, 12, -1, 64, 1000, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62, -(1 << 62))
_TEXTS = ("storage", "0", "1", "2", "cpu", "meta", "cuda", "", "x" * 50)
_HOOKS = b"ccollections\nOrderedDict\n)R"
_MAX_DEPTH = 4


def program(rng: Random) -> bytes:
    """The pickle of a dict of some values."""
    values = b"".join(_text(f"k{i}") + _value(rng, 0) for i in range(rng.randrange(1, 4)))
    return b"\x80\x02}(" + values + b"u."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(rng: Random) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", rng.choice(_NUMBERS))


def _global(name: str) -> bytes:
    module, _, leaf = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + leaf.encode() + b"\n"


def _constant(rng: Random) -> bytes:
    return rng.choice(
        [
            *(_number(rng), b"N", b"\x88", b"\x89", b")", b"]", b"}", _text(rng.choice(_TEXTS))),
            *(b"G" + struct.pack(">d", rng.choice([0.0, 1e308, float("nan")])), _global(rng.choice(_GLOBALS))),
        ]
    )


def _values(rng: Random, depth: int) -> bytes:
    return b"".join(_value(rng, depth + 1) for _ in range(rng.randrange(4)))


def _storage(rng: Random) -> bytes:
    kind, key = rng.choice(_STORAGES), rng.choice("0123")
    return b"(" + _text("storage") + _global(f"torch.{kind}") + _text(key) + _text("cpu") + _number(rng) + b"tQ"


def _sizes(rng: Random, count: int) -> bytes:
    return b"(" + b"".join(_number(rng) for _ in range(count)) + b"t"


def _tensor(rng: Random) -> bytes:
    ndim = rng.randrange(4)
    sizes = _sizes(rng, ndim) + _sizes(rng, rng.choice([ndim, ndim, ndim, rng.randrange(4)]))
    placed = _storage(rng) + _number(rng) + sizes
    made: dict[str, Callable[[], bytes]] = {
        "tensor": lambda: placed,
        "tensor_v2": lambda: placed + b"\x89" + _HOOKS,
        "tensor_v3": lambda: placed + b"\x89" + _HOOKS + _global("torch.float32"),
        "meta_tensor_no_storage": lambda: _global("torch.float32") + sizes + b"\x89",
        "sparse_tensor": lambda: _constant(rng) + _sizes(rng, 3),
        "parameter": lambda: _tensor(rng) + b"\x89" + _HOOKS,
        "parameter_with_state": lambda: _tensor(rng) + b"\x89" + _HOOKS + _constant(rng),
    }
    name = rng.choice([*made, "tensor_v2", "tensor_v2", "tensor_v2"])
    return _global(f"torch._utils._rebuild_{name}") + b"(" + made[name]() + b"tR"


def _value(rng: Random, depth: int) -> bytes:
    kind = rng.randrange(10)
    if kind < 4:
        return _tensor(rng)
    if kind < 6 or depth >= _MAX_DEPTH:
        return _constant(rng)
    if kind == 6:
        return b"](" + _values(rng, depth) + b"e"
    if kind == 7:
        return b"}(" + b"".join(_constant(rng) + _value(rng, depth + 1) for _ in range(rng.randrange(4))) + b"u"
    if kind == 8:
        return b"(" + _values(rng, depth) + b"t"
    call = _global(rng.choice(_CALLABLE)) + b"(" + _values(rng, depth) + b"t" + rng.choice([b"R", b"R", b"\x81"])
    return call + (_value(rng, depth + 1) + b"b" if rng.random() < 0.2 else b"")
