"""A short measurement of this machine gives plausible constants, the same on all ranks."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import msgspec
import pytest
import torch

from collectives import Communicator
from mpitrain.job.record.machine.constants import KernelConstants, Links
from mpitrain.tools.plan.measuring.cluster import measured
from mpitrain.tools.plan.measuring.constants import Sections, to_toml
from mpitrain.tools.plan.measuring.links import links
from mpitrain.tools.plan.measuring.rig import Rig


@pytest.fixture(scope="module")
def sections() -> Sections:
    import collectives

    return measured(collectives.world(), torch.device("cpu"), name="here", seconds=1)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a value."""
    if isinstance(value, tuple):
        for part in value:
            yield from numbers(part)
    elif not isinstance(value, str):
        yield value


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
@pytest.mark.timeout_s(240)
def test_constants_are_positive_and_the_same_on_all_ranks(comm: Communicator, sections: Sections) -> None:
    for name, section in sections.items():
        for key, constant in section.items():
            least = 0.0 if key == "weight_s" or name == "overheads" else 1e-15  # noise may exceed what is left
            assert all(least <= value < math.inf for value in numbers(constant.value)), (key, constant)
    assert all(other == sections for other in comm.all_gather_object(sections))
    assert all(0 < constant.value <= 1 for constant in sections["efficiency"].values())  # type: ignore[operator]


@pytest.mark.ranks(1, 2)
def test_constants_are_those_of_a_computer(comm: Communicator, sections: Sections) -> None:
    """Within wide limits, which a wrong unit or a forgotten factor of a thousand breaks."""
    values = {key: constant.value for name in ("", "kernels") for key, constant in sections[name].items()}
    limits = {
        "flops": (1e8, 1e14),
        "memory_bandwidth": (1e8, 1e12),
        "launch_s": (1e-7, 1e-3),
        "node_bandwidth": (1e7, 1e12),
    }
    limits |= {
        "node_latency_s": (1e-8, 0.1),
        "memory": (1e8, 1e14),
        "update_s": (1e-11, 1e-6),
        "grad_norm_s": (1e-12, 1e-6),
    }
    for key, (least, most) in limits.items():
        assert least < values[key] < most, key  # type: ignore[operator]
    assert values["ranks_per_node"] == comm.node.size
    is_linked = comm.node.size > 1 and comm.num_nodes == 1
    assert [*sections["links"]] == [
        field.name for field in fields(Links) if is_linked and field.name.startswith("node_")
    ]
    for constant in sections["links"].values():
        (_, small_s), *_, (_, large_s) = constant.value  # type: ignore[misc]
        assert small_s < large_s


@pytest.mark.ranks(1, 2)
def test_the_file_is_read_back(comm: Communicator, sections: Sections) -> None:
    text = to_toml(sections, "Of a test.")
    read = tomllib.loads(text)
    kernels, of_links = (
        msgspec.convert(read[name], kind) for name, kind in (("kernels", KernelConstants), ("links", Links))
    )
    assert kernels.gelu_s == pytest.approx(sections["kernels"]["gelu_s"].value, rel=1e-3)
    assert (of_links.node_message is not None) == (comm.node.size > 1)
    if find_spec("mpitrain.job.record.machine.machine") is None:
        pytest.skip("the planner's reader is not there")
    from mpitrain.job.record.machine.machine import from_text

    machine = from_text(text, "a test")
    assert machine.flops == pytest.approx(sections[""]["flops"].value, rel=1e-3)
    assert machine.element_bytes == 4 and machine.shares_memory
    assert machine.overheads is not None
    assert (machine.overheads.sequence is not None) == (comm.node.size > 1)
    assert 1e-6 < sum(machine.overheads.data) < 10


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.one_node
@pytest.mark.timeout_s(240)
def test_links_between_nodes(two_nodes: Communicator) -> None:
    """Of nodes with one rank each, and with two."""
    found = links(Rig(two_nodes, torch.device("cpu"), torch.float32), perf_counter(), 1e10)
    expected = {"all_reduce", "all_gather", "reduce_scatter", "message"}
    if two_nodes.node.size > 1:
        expected |= {f"node_{name}" for name in (*expected, "gather_tokens", "scatter_tokens", "sum_tokens")}
    assert {*found["links"]} == expected | {"num_nodes"} and found["links"]["num_nodes"].value == 2
    assert all(found[""][key].value > 0 for key in ("bandwidth", "latency_s", "node_bandwidth"))  # type: ignore[operator]
    assert "Not measured" not in found[""]["bandwidth"].how
    assert ("Not measured" in found[""]["node_bandwidth"].how) == (two_nodes.node.size == 1)
