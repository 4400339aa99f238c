"""The machine file of `plan --measure`: its text, and the arithmetic from seconds to constants. Without measurements."""

import tomllib
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from mpitrain.job.record.machine.constants import KernelConstants, Links
from mpitrain.job.record.machine.memory import node_bytes
from mpitrain.tools.plan.measuring import kernels, links
from mpitrain.tools.plan.measuring.constants import MeasuredConstant, to_toml
from mpitrain.tools.plan.measuring.links import GroupLinks

SIZES = kernels.KernelSizes(tokens=512, width=768, parameters=1000)
FLOPS = 2 * 512 * 768 * 4 * 768
CAUSAL = 2 * 512 * 128 * 768  # without the masked half
OF_CALLS = {
    "cut forward": FLOPS / 8e10 + 1e-4,
    "cut backward": 2 * FLOPS / 4e10 + 3e-4,
    "residual": 512 * 768 * 1e-9,
    "small": 3e-6,
}
OF_CALLS |= {"copy": 8000 / 1e10, "add": 2e-6, "grad norm": 1e-6, "update": 4e-6}
OF_GRADIENTS = {
    "linear": (FLOPS / 5e10 + 1e-4, 2 * FLOPS / 1e11 + 3e-4),
    "few rows": (FLOPS / 8 / 5e10 + 1e-4, 2 * FLOPS / 8 / 1e11 + 3e-4),
    "attention 128": (CAUSAL / 5e9, 2.5 * CAUSAL / 1e10),
    "attention 256": (CAUSAL / 1e10, 2.5 * CAUSAL / 2e10),
    "attention 1024": (4 / 3 * CAUSAL / 3e10, 2.5 * 4 / 3 * CAUSAL / 4e10),  # of one head
    "norm": (512 * 768 * 1e-9, 512 * 768 * 2e-9),
    "gelu": (512 * 3072 * 3e-9, 512 * 3072 * 4e-9),
    "loss": (512 * kernels.CLASSES * 1e-9, 512 * kernels.CLASSES * 5e-9),
    "small with autograd": (kernels.SMALL * 4e-6, kernels.SMALL * 5e-6),
}
TAKEN = {(name, "call"): seconds for name, seconds in OF_CALLS.items()} | {
    (name, action): seconds
    for name, pair in OF_GRADIENTS.items()
    for action, seconds in zip(("forward", "backward"), pair, strict=True)
}
"""What the contestants took in the tests."""


def test_the_file_is_toml_with_the_origin_of_each_constant() -> None:
    sections = {
        "": {
            "name": MeasuredConstant('a "b"', "A name."),
            "memory": MeasuredConstant(12_638_251_008, "Whole."),
            "one": MeasuredConstant(1.0, "Not whole."),
            "small": MeasuredConstant(1.23456e-9, "Cut to four digits."),
            "yes": MeasuredConstant(True, "Two\nlines."),
        },
        "links": {"pair": MeasuredConstant((2e9, 0.5), "A pair.")},
    }
    text = to_toml(sections, "First.\nSecond.")
    assert text.startswith("# First.\n# Second.\n\n# A name.\nname = ")
    assert "# Two\n# lines.\nyes = true\n" in text and "\n\n[links]\n# A pair.\n" in text
    read = tomllib.loads(text)
    assert read == {
        "name": 'a "b"', "memory": 12_638_251_008, "one": 1.0, "small": 1.235e-9, "yes": True, "links": {"pair": [2e9, 0.5]},
    }  # fmt: skip
    assert isinstance(read["one"], float)


def test_constants_of_kernels() -> None:
    found = kernels.constants(TAKEN, 9e10, SIZES, 4)
    values = {name: constant.value for section in found.values() for name, constant in section.items()}
    read = msgspec.convert({name: constant.value for name, constant in found["kernels"].items()}, KernelConstants)
    assert [*found["kernels"]] == [field.name for field in fields(KernelConstants)]
    assert read.product_flops == pytest.approx((5e10, 1e11))
    assert read.cut_product_flops == pytest.approx((8e10, 4e10))
    assert read.weight_s == pytest.approx((1e-4 / (4 * 768**2), 3e-4 / (4 * 768**2)))
    for length, pair in zip(
        read.attention_flops, ((128, 5e9, 1e10), (256, 1e10, 2e10), (1024, 3e10, 4e10)), strict=True
    ):
        assert length == pytest.approx(pair)
    assert read.norm_s == pytest.approx((1e-9, 2e-9)) and read.gelu_s == pytest.approx((3e-9, 4e-9))
    assert read.loss_s == pytest.approx((1e-9, 5e-9)) and read.operation_s == pytest.approx((4e-6, 5e-6))
    assert (read.residual_s, read.update_s, read.grad_norm_s, read.add_s) == pytest.approx((1e-9, 4e-9, 1e-9, 2e-9))
    assert values["memory_bandwidth"] == pytest.approx(1e10) and values["launch_s"] == 3e-6
    assert values["flops"] == 9e10
    assert values["product"] == pytest.approx(3 * FLOPS / sum(OF_GRADIENTS["linear"]) / 9e10)
    assert values["attention"] == pytest.approx(3.5 / (1 + 2.5 / 2) * 1e10 / 9e10)
    # A block's 2 norms, 2 x 2 sums and GELU of four widths take 6 + 4 + 28 ns an element, and move 40 numbers of 4 bytes.
    assert values["stream"] == pytest.approx(160 / 38e-9 / 1e10)


def test_no_share_exceeds_the_whole() -> None:
    """A layer that is faster than the square product is the peak, and a kernel in the cache reaches more than the memory."""
    found = kernels.constants(TAKEN | {("copy", "call"): 1.0}, 1e10, SIZES, 4)
    assert found[""]["flops"].value == pytest.approx(3 * FLOPS / sum(OF_GRADIENTS["linear"]))
    assert found["efficiency"]["product"].value == found["efficiency"]["stream"].value == 1


def test_seconds_of_products_and_attention() -> None:
    """At the sizes that were measured they are what was measured; between two lengths they are in between."""
    found = kernels.constants(TAKEN, 9e10, SIZES, 4)["kernels"]
    read = msgspec.convert({name: constant.value for name, constant in found.items()}, KernelConstants)
    assert read.product_s(512, 768, 3072) == pytest.approx(OF_GRADIENTS["linear"])
    assert read.product_s(64, 768, 3072) == pytest.approx(OF_GRADIENTS["few rows"])
    assert read.product_s(512, 768, 3072, is_cut=True)[0] == pytest.approx(OF_CALLS["cut forward"])
    assert read.attention_s(512, 256, 384) == pytest.approx((CAUSAL / 1e10, 2.5 * CAUSAL / 2e10))
    rate = 2 * 512 * 512 * 100 / read.attention_s(512, 512, 100)[0]
    assert rate == pytest.approx(2e10)  # halfway from 256 to 1024, in factors
    for length, nearest in ((1, 128), (100_000, 1024)):
        near, far = (read.attention_s(1, keys, 1)[0] / keys for keys in (length, nearest))
        assert near == pytest.approx(far)


@pytest.mark.parametrize(
    ("few_s", "many_s", "expected"),
    [(2.0, 9.0, 1.0), (0.5, 8.0, 0.0), (9.0, 9.0, 4.5)],  # the last two are noise
)
def test_seconds_for_no_rows(few_s: float, many_s: float, expected: float) -> None:
    assert kernels._fixed((64, few_s), (512, many_s)) == pytest.approx(expected)


def of_sizes(small_s: float, large_s: float) -> tuple[tuple[float, float], ...]:
    return (links.SMALL, small_s), (1 << 20, 1e-3), (links.LARGE, large_s + small_s)


SPAN = links.LARGE - links.SMALL
OF_NODE = {
    "all_reduce": of_sizes(8e-6, SPAN / 4e9), "all_gather": of_sizes(4e-6, SPAN / 8e9),
    "reduce_scatter": of_sizes(6e-6, SPAN / 2e9), "message": of_sizes(9e-6, SPAN / 1e9),
}  # fmt: skip
"""4, 8 and 2 GB of the array per second, after the latency."""


def test_constants_of_links() -> None:
    """A gather on 8 ranks moves 7/8 of the array through each, and an all-reduce twice this."""
    slower = {name: tuple((size, 10 * seconds) for size, seconds in sizes) for name, sizes in OF_NODE.items()}
    found = links.constants({"node": GroupLinks(8, OF_NODE), "network": GroupLinks(2, slower)}, 1e10)
    top = {key: constant.value for key, constant in found[""].items()}
    assert top == pytest.approx({"node_bandwidth": 7e9, "bandwidth": 4e8, "node_latency_s": 2e-6, "latency_s": 6e-5})
    harmonic = 3 / (1 / 7 + 1 / 7 + 1 / 1.75)
    assert found["efficiency"]["node_link"].value == pytest.approx(harmonic / 7)
    read = msgspec.convert({name: constant.value for name, constant in found["links"].items()}, Links)
    assert read.num_nodes == 2 and read.node_message == OF_NODE["message"] and read.message == slower["message"]


def test_seconds_of_links() -> None:
    read = Links(node_message=((1000, 1e-6), (2000, 3e-6), (4000, 4e-6)))
    found = [read.seconds("node_message", nbytes) for nbytes in (0, 1000, 1500, 2000, 3000, 4000, 8000)]
    assert found == pytest.approx([1e-6, 1e-6, 2e-6, 3e-6, 3.5e-6, 4e-6, 8e-6])
    assert read.seconds("message", 1000) is None
    with pytest.raises(ValueError, match="sizes that increase"):
        Links(message=((2000, 1.0), (1000, 1.0)))


def test_links_that_are_not_there_have_the_values_of_those_that_are() -> None:
    of_node = links.constants({"node": GroupLinks(2, OF_NODE)}, 1e10)
    assert of_node[""]["bandwidth"].value == of_node[""]["node_bandwidth"].value == pytest.approx(4e9)
    assert "all ranks are on one node" in of_node[""]["bandwidth"].how
    assert not any(
        "Not measured" in constant.how
        for constant in (of_node[""]["node_bandwidth"], of_node["efficiency"]["node_link"])
    )
    across = links.constants({"network": GroupLinks(2, OF_NODE)}, 1e10)
    assert across[""]["node_bandwidth"].value == across[""]["bandwidth"].value == pytest.approx(4e9)
    assert "each node has one rank" in across[""]["node_bandwidth"].how and set(across["links"]) == {
        *OF_NODE,
        "num_nodes",
    }
    alone = links.constants({}, 1e10)
    assert alone[""]["bandwidth"].value == 5e9 and alone["links"] == {}


def test_kernels_refuse_what_is_not_positive() -> None:
    values = {name: constant.value for name, constant in kernels.constants(TAKEN, 9e10, SIZES, 4)["kernels"].items()}
    with pytest.raises(msgspec.ValidationError, match=r"kernels\.gelu_s: expected positive numbers"):
        msgspec.convert(values | {"gelu_s": (0.0, 1.0)}, KernelConstants)
    with pytest.raises(msgspec.ValidationError, match="lengths that increase"):
        msgspec.convert(values | {"attention_flops": ((256, 1.0, 1.0), (128, 1.0, 1.0))}, KernelConstants)
    assert msgspec.convert(values | {"weight_s": (0.0, 0.0)}, KernelConstants).weight_s == (0, 0)


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/a/b", {}, 4096 * 1024),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "1000000"}, 1_000_000),  # of an outer group
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "1000000", "sys/fs/cgroup/a/b/memory.max": "max"}, 1_000_000),
        ("0::/not/there", {"sys/fs/cgroup/memory.max": "2000000"}, 2_000_000),  # within a container
        ("5:cpu,memory:/job", {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000"}, 3_000_000),
        (
            "5:memory:/job",
            {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712"},
            4096 * 1024,
        ),  # none
        ("4:cpu:/job", {"sys/fs/cgroup/cpu/job/memory.limit_in_bytes": "5"}, 4096 * 1024),
    ],
)
def test_memory_within_limits(tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": cgroup + "\n",
        **limits,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert node_bytes(tmp_path) == expected


def test_memory_of_this_machine() -> None:
    assert 1 << 28 < node_bytes() < 1 << 50
