"""Commands whose reader closes the pipe, as `| head` does."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
from collectives.commands.closed_pipe import ends_with_its_reader

ROOT = Path(__file__).parents[2]


@pytest.mark.rest
@pytest.mark.parametrize(
    "command",
    [
        "mpitrain --help",  # print
        "mpitrain schedules show 1f1b",  # rich
        "mpitrain diff a a --json",  # handles OSError by itself
        "ckpt show a --json",
        "collectives --help",  # argparse
        "collectives check --ranks 2",
    ],
)
def test_a_command_ends_quietly(command: str, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"x": np.ones(2)}, comm=None)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONUNBUFFERED", None)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env=env,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_other_broken_pipes_are_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), ends_with_its_reader():
        os.write(writer, b"x")
    os.close(writer)
