"""Commands that read the folder of a run which a stranger has made: one line or a page, soon, in little memory, as plain text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_readers import COMMANDS
from hostile_runs import HARMS, READ_BY

HELPERS = Path(__file__).parents[3] / "helpers"
MOST_S, MOST_MB = 2.0, 300.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Of each harm and command, from one process."""
    base = tmp_path_factory.mktemp("hostile")
    done = subprocess.run(
        [sys.executable, str(HELPERS / "hostile_readers.py"), str(base)],
        capture_output=True, text=True, timeout=90, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["name"], line["command"]): line for line in lines}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_or_a_line(command: str, results: dict[tuple[str, str], Any]) -> None:
    for name in (name for name in HARMS if command in READ_BY.get(name, COMMANDS)):
        found, case = results[name, command], f"{command}, {name}"
        assert found["code"] in ((0, 1, 2) if command == "diff" else (0, 1)), f"{case}: {found['code']}"
        # Other processes may have the cores: a wait without work ends the whole program.
        assert found["cpu_s"] < MOST_S and found["s"] < 10 * MOST_S and found["mb"] < MOST_MB, (
            f"{case}: {found['cpu_s']} s, {found['s']} s with waits, {found['mb']} MB"
        )
        text = found["out"] + found["err"]
        assert all(character.isprintable() or character == "\n" for character in text), f"{case}: {text!r}"
        assert not any(word in text for word in ("Traceback", "Warning", "TOPSECRET", "root:", "[Errno")), (
            f"{case}: {text}"
        )
        if found["err"]:
            assert found["err"].startswith("mpitrain: error: ") and found["err"].count("\n") == 1, (
                f"{case}: {found['err']}"
            )
            assert len(found["err"]) < 1000, f"{case}: {found['err']}"
