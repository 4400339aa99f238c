"""A request to stop is heard from the first moment. That a run obeys it is tested in tests/launch."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.job.train import stop

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stop, "_requested", False)
    monkeypatch.delenv("MPITRAIN_STOP_FILE", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
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


def test_under_srun_sigterm_is_a_request_from_the_first_moment_and_never_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm sends it once more at the end of a grace time, while the ranks may still save."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    before = signal.getsignal(signal.SIGTERM)
    stop.listen(trains=False)
    assert signal.getsignal(signal.SIGTERM) == before, "a command that trains nothing ends by it"
    try:
        stop.listen()
        for is_heard_earlier in (False, True):
            with stop.interrupts_are_requests(rank=0):
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert stop.requested()
            os.kill(os.getpid(), signal.SIGTERM)  # during the last save
            assert capfd.readouterr().err == (
                "" if is_heard_earlier else "mpitrain: stopping after this step, with a checkpoint\n"
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")  # of an mpirun whose daemons srun has started
    stop.listen()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_is_a_request_and_the_second_the_end(
    signum: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signum, signal.default_int_handler)
    try:
        with stop.interrupts_are_requests(rank=0):
            os.kill(os.getpid(), signum)
            assert stop.requested()
            assert capfd.readouterr().err.startswith("mpitrain: stopping after this step, with a checkpoint")
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signum)
        with stop.interrupts_are_requests(rank=1):
            os.kill(os.getpid(), signum)
        assert capfd.readouterr().err == "", "one rank speaks"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
    finally:
        signal.signal(signum, before)


def test_who_listened_to_signals_before_hears_them_in_a_run_under_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """As collectives does, which prints the last operations at SIGUSR2."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    handler, listener = signal.signal(signal.SIGUSR2, lambda *_: None), signal.set_wakeup_fd(mouth)
    try:
        with stop.interrupts_are_requests(rank=0):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert select.select([ear], [], [], 10.0)[0], "not heard"
            assert os.read(ear, 10) == bytes([signal.SIGUSR2])
        assert signal.set_wakeup_fd(listener) == mouth
    finally:
        signal.set_wakeup_fd(listener)
        signal.signal(signal.SIGUSR2, handler)
        os.close(ear)
        os.close(mouth)


def test_a_rank_that_open_mpi_ends_promises_no_checkpoint() -> None:
    code = (
        "import os, signal, time\n"
        "from mpitrain.job.train import stop\n"
        "with stop.interrupts_are_requests(rank=0):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0"}
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, "with a checkpoint" in answer.stderr) == (128 + signal.SIGTERM, False), answer
