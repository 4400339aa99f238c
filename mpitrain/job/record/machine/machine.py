"""The numbers of a machine: what its ranks compute, hold and send. Read from small TOML files (`machines/`, or the user's own)."""

import difflib
import math
import os
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any

import msgspec

from mpitrain.job.record.machine.constants import KernelConstants, Links, Overheads


@dataclass(frozen=True)
class Efficiency:
    """Which share of its limit each kind of work reaches."""

    product: float
    """Large matrix products, of `flops`."""
    attention: float
    """Fused attention, of `flops`."""
    stream: float
    """Element-wise kernels, of `memory_bandwidth`."""
    node_link: float
    """Collectives within a node, of `node_bandwidth`."""
    link: float
    """Collectives and messages between nodes, of `bandwidth`."""
    overlap: float
    """Of two things that run at the same time, computation and a collective: the part of the shorter one that the longer one hides.
    The rest is lost, because both use the same memory and the same cores."""
    memory: float
    """The share of `memory` that tensors can have. The rest is for libraries, buffers of collectives, and fragmentation."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_overlap = getattr(self, field.name), field.name == "overlap"
            # CPUs whose MPI has no progress thread overlap nothing.
            if not (0 < value <= 1 or (is_overlap and value == 0)):
                least = "of at least 0" if is_overlap else "above 0"
                raise ValueError(f"efficiency.{field.name}: expected a share {least} and at most 1, got {value:g}")


@dataclass(frozen=True)
class Machine:
    """A cluster whose nodes are alike. A rank is a GPU, or a process on CPU cores. Bandwidths are for one direction.

    Raises:
        ValueError: a number that is not positive.
    """

    name: str
    """The name in a plan."""
    flops: float
    """Peak of one rank, in floating-point operations per second, dense, in the dtype of forward and backward."""
    memory: float
    """Bytes of one rank."""
    memory_bandwidth: float
    """Bytes per second between one rank and its memory."""
    ranks_per_node: int
    """Ranks of a full node."""
    node_bandwidth: float
    """Bytes per second that one rank sends to the other ranks of its node."""
    bandwidth: float
    """Bytes per second that one rank sends to other nodes while all ranks of its node do."""
    node_latency_s: float
    """Seconds of a small message within a node."""
    latency_s: float
    """Seconds of a small message between nodes."""
    launch_s: float
    """Seconds that the smallest operation takes: a kernel, or torch's overhead on CPUs."""
    efficiency: Efficiency
    """Shares of the limits above."""
    element_bytes: int = 2
    """Bytes of a number in forward and backward: 2 for bf16 and fp16, 4 for fp32."""
    shares_memory: bool = False
    """The ranks of a node can hold full parameters together: CPUs."""
    price: float | None = None
    """Of one rank for an hour, if no other price is given."""
    kernels: KernelConstants | None = None
    """Measured times of kernels, in place of shares of the limits: `plan --measure` writes them."""
    links: Links | None = None
    """Measured times of communication, in place of shares of the limits."""
    overheads: Overheads | None = None
    """Measured times of Python and of waits; None: nothing but `launch_s`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise ValueError(f"{field.name}: expected a positive number, got {value:g}")
        if self.element_bytes not in (2, 4):
            raise ValueError(f"element_bytes: expected 2 or 4, got {self.element_bytes}")

    def __hash__(self) -> int:
        """Of few fields, because caches of prices ask for it often, and the measured times are many numbers."""
        return hash((self.name, self.flops, self.memory))


_SECTIONS: dict[str, type[Any]] = {
    "efficiency": Efficiency,
    "kernels": KernelConstants,
    "links": Links,
    "overheads": Overheads,
}


def names() -> list[str]:
    """The machines that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load(name: str) -> Machine:
    """A machine that comes with the package, or that a TOML file describes.

    Raises:
        ValueError: an unknown name, a file that cannot be read, an unknown or a missing key, a wrong type or value.
    """
    if name in names():
        return from_text(_folder().joinpath(f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")
    if not name.endswith(".toml") and not os.path.exists(name):
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names())}, or a TOML file"
        raise ValueError(f"unknown machine {name!r}: {hint}")
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"machine file {name}: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are not UTF-8
        raise ValueError(f"machine file {name} is not valid TOML: {error}") from None
    return from_text(text, name)


def from_text(text: str, source: str) -> Machine:
    """A machine from the text of a TOML file; ValueError like `load`, with `source` in the message."""
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"machine file {source} is not valid TOML: {error}") from None
    for name in _SECTIONS:
        if not isinstance(section := document.get(name, {}), dict):
            raise ValueError(f"machine file {source}: {name}: expected a section [{name}], got {section!r}")
    _check_keys(document, Machine, source, "")
    for name, kind in _SECTIONS.items():
        if name in document:
            _check_keys(document[name], kind, source, f"{name}.")
    try:
        return msgspec.convert(document, Machine)
    except msgspec.ValidationError as error:  # also the ValueErrors of the dataclasses
        raise ValueError(f"machine file {source}: {_plain(str(error))}") from None


def _plain(message: str) -> str:
    """A message of msgspec with the key first: "flops: expected a number, got a text"."""
    what, _, where = message.partition(" - at `$")
    key = where.strip("`.")
    for theirs, ours in _TYPES.items():
        what = what.replace(f"`{theirs}`", ours)
    what = what[:1].lower() + what[1:] if key else what
    return f"{key}: {what}" if key else what


_TYPES = {
    "float | null": "a number",
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a section",
}
"""What msgspec's names of types are in TOML."""


def _check_keys(given: dict[str, Any], kind: type[Any], source: str, prefix: str) -> None:
    """ValueError for a key that the dataclass `kind` does not have, or that it needs."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"expected {', '.join(known)}"
            raise ValueError(f"unknown key {prefix}{key} in machine file {source}: {hint}")
    missing = [prefix + key for key, is_needed in known.items() if is_needed and key not in given]
    if missing:
        raise ValueError(f"machine file {source}: {missing[0]} is missing")


def _folder() -> Any:
    return resources.files(__package__) / "machines"
