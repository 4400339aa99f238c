"""`python -m mpitrain watch` as a user runs it: once, as a picture, and live in a terminal."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from terminals import ROOT, InTerminal

from benchmarks.monitoring.recorded_runs import write_run
from mpitrain.cli import main


def test_one_view_without_torch_and_mpi(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=30)
    script = (
        "import sys; from mpitrain.cli import main; code = main(['watch', sys.argv[1]]); "
        "print(code, [name for name in ('torch', 'mpi4py.MPI', 'h5py') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == "" and result.stdout.splitlines()[-1] == "0 []"
    assert "step 30/30" in result.stdout and "\x1b" not in result.stdout


def test_a_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=30)
    assert main(["watch", str(tmp_path / "run"), "--svg", str(tmp_path / "a.svg"), "--width", "90"]) == 0
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot().itertext()).replace("\xa0", " ")
    assert "url(http" not in (tmp_path / "a.svg").read_text(), "it needs no network"
    assert "mpitrain watch run" in text and "finished" in text and "tokens/s" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN/none"], "watch: there is no folder RUN/none; expected the folder of a run, which --run named in training"),
        (["RUN/config.toml"], "watch: RUN/config.toml is a file; expected the folder of a run, which --run named in training"),
        (["RUN", "--svg", "RUN/d.svg"], "--svg: RUN/d.svg is a folder; expected a file"),
        (["RUN", "--svg", "RUN/no/a.svg"], "--svg: RUN/no/a.svg cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_folders(tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, steps=1)
    (tmp_path / "d.svg").mkdir()
    assert main(["watch", *(word.replace("RUN", str(tmp_path)) for word in words)]) == 1
    assert capsys.readouterr().err == f"mpitrain: error: {said.replace('RUN', str(tmp_path))}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read each folder")
@pytest.mark.parametrize("rights", [0o600, 0o300])
def test_a_folder_without_rights_is_an_error(tmp_path: Path, rights: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    folder.chmod(rights)
    try:
        assert main(["watch", str(folder)]) == 1
    finally:
        folder.chmod(0o700)
    assert capsys.readouterr().err == f"mpitrain: error: watch: {folder} cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    "words", [["--every", "0"], ["--every", "nan"], ["--width", "5"], ["--width", "x"], ["--svg", "a.png"], []]
)
def test_wrong_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["watch", *(["runs/a", *words] if words else [])])
    assert "error: " in capsys.readouterr().err


def test_live_in_a_terminal(tmp_path: Path) -> None:
    """A folder that appears, steps that come, another size of the terminal, keys, and an end that leaves the terminal as it was."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "mpitrain", "watch", str(folder), "--every", "0.1"]
    with InTerminal(command, columns=100) as terminal:
        terminal.until("waiting: there is no such folder yet")
        folder.mkdir()
        (folder / ".lock").touch()
        terminal.until("starting: no step yet")
        lines = [
            json.dumps({"step": step, "loss": 4.0 - step / 100, "tokens_per_s": 1e3}) + "\n" for step in range(1, 201)
        ]
        (folder / "metrics.jsonl").write_text("".join(lines))
        assert "tokens/s" in terminal.until(r"(?s)running.*step 200.*mean of.*q quit")
        terminal.send("+")
        terminal.until(r"(?s)step +150 +200")
        terminal.send("\x1b[D")
        terminal.until(r"(?s)step +100 +150")
        terminal.resize(40, 20)
        terminal.until(r"\nstep 200 {32}\r\n")
        assert max(len(line) for line in terminal.until("q quit").split("\r\n")) <= 40
        assert not terminal.has_first_modes()
        terminal.send("\x1a")
        os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert terminal.has_first_modes(), "Ctrl-Z gives the terminal to the shell"
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("(?s)running.*q quit")
        terminal.send("q")
        assert terminal.end() == 0
        assert terminal.output.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.output[-40:]
        assert terminal.has_first_modes()


@pytest.mark.parametrize(("keys", "code"), [("\x03", 0), (None, 143)])
def test_ctrl_c_and_sigterm_restore_the_terminal(tmp_path: Path, keys: str | None, code: int) -> None:
    with InTerminal([sys.executable, "-m", "mpitrain", "watch", str(tmp_path)], columns=80) as terminal:
        terminal.until("waiting for a job")
        terminal.send(keys) if keys else terminal.process.terminate()
        assert terminal.end() == code
        assert (
            "\x1b[?1049l" in terminal.output and "\x1b[?25h" in terminal.output and "Traceback" not in terminal.output
        )
        assert terminal.has_first_modes()
