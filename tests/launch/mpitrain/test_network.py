"""Formats between hosts, on the hosts of mpirun/cluster: bytes that leave a host, counted by its network devices, and losses."""

import json
from pathlib import Path

import pytest
from hosts import cluster, need_namespaces

from mpitrain.tools.bench.network.results import WireLaunch

pytestmark = pytest.mark.rest

RATIOS = {"fp32": (1, 1), "bf16": (0.49, 0.505), "int8": (0.25, 0.26)}
"""Of bytes: with a byte of each element, and 4 of each block of 256, int8 takes 0.254."""


@pytest.fixture(autouse=True)
def needs_namespaces() -> None:
    need_namespaces()


def test_a_smaller_format_sends_fewer_bytes_and_keeps_the_loss(tmp_path: Path) -> None:
    file = tmp_path / "wire.json"
    # The bytes are those of the median step: TCP may send some packets again, or smaller ones.
    words = ["--shape", "256x4x1", "--steps", "5", "--json", str(file)]
    result = cluster("-H", "2x2", "--", "python", "-m", "mpitrain", "bench", "wire", *words, timeout_s=100)
    assert result.returncode == 0, str(result)
    assert json.loads(file.read_text())["nodes"] == 2
    rows = WireLaunch.read(str(file)).rows
    assert [(row.stage, row.wire) for row in rows] == [(stage, wire) for stage in (0, 3) for wire in RATIOS]
    for row in rows:
        exact = next(other for other in rows if (other.stage, other.wire) == (row.stage, "fp32"))
        least, most = RATIOS[row.wire]
        assert least <= row.sent_bytes / exact.sent_bytes <= most, rows
        assert row.loss == pytest.approx(exact.loss, abs=0.02), rows  # after seven steps at a learning rate of 1e-3
