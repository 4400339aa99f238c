"""A request to stop is heard from the first moment. That a run obeys it is tested in tests/launch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.train import stop

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stop, "_requested", False)
    monkeypatch.delenv("MPITRAIN_STOP_FILE", raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_a_request() -> None:
    stop.listen()
    assert not stop.requested()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.requested()


def test_a_request_from_before_the_start_stands_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_STOP_FILE", str(tmp_path / "stop"))
    stop.listen()
    assert not stop.requested()
    (tmp_path / "stop").touch()
    stop.listen()
    assert stop.requested()


def test_the_program_listens_before_it_loads_anything_heavy() -> None:
    code = (
        "import signal, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'numpy', 'mpi4py', 'collectives'):\n"
        "            print(name, callable(signal.getsignal(signal.SIGUSR1)))\n"
        "            raise SystemExit\n"
        "sys.meta_path.insert(0, Look())\n"
        "import mpitrain.__main__\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout.split()[1:] == ["True"], answer.stdout + answer.stderr
