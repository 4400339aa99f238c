"""`python -m collectives bench --codec`, on any number of ranks."""

from pathlib import Path

import pytest

from collectives import world
from collectives.bench.codec import CodecLaunch
from collectives.cli import main
from collectives.codec.choice import available
from collectives.codec.formats import FORMATS


def test_bench_measures_every_format_by_every_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comm, file = world(), tmp_path / "codec.json"
    assert main(["bench", "--codec", "--sizes", "4KiB,1001", "--seconds", "0.001", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    if comm.rank != 0:
        assert shown == "" and not file.exists()
        return
    launch = CodecLaunch.read(str(file))
    assert launch.ranks == comm.size
    assert shown.count("codec, 4 KiB of float32") == shown.count("codec, 1000 B of float32") == 1
    measured = {(row.format, row.implementation): row for row in launch.results if row.nbytes == 4096}
    names = list(available().codecs)
    assert set(measured) == {("fp32", "numpy"), *((name, by) for name in FORMATS if name != "fp32" for by in names)}
    row = measured["int8", "numpy"]
    assert row.encoded_nbytes == 1024 + 4 * 4 and row.rounds >= 5 and min(row.seconds.values()) > 0
    assert row.share_of_saved_time == pytest.approx((row.seconds["encode"] + row.seconds["decode_add"]) / (3056 * 8e-9))
    assert measured["fp32", "numpy"].share_of_saved_time is None
