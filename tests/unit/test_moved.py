"""Module paths of earlier versions."""

import importlib
import subprocess
import sys

import pytest

from mpitrain._moved import MOVED, new_path


@pytest.mark.parametrize(
    "old", [*(old for old in sorted(MOVED) if old[-1] != "."), "mpitrain.config.page", "mpitrain.data.tokens"]
)
def test_an_old_path_is_the_module_of_today_and_says_so(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new_path(old)}"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(new_path(old) or "")


def test_modules_of_a_package_that_has_moved() -> None:
    from mpitrain.tools.bench import timing

    sys.modules.pop("mpitrain.bench.timing", None)
    with pytest.warns(DeprecationWarning, match="mpitrain.bench.timing is mpitrain.tools.bench.timing"):
        assert importlib.import_module("mpitrain.bench.timing") is timing
    assert timing.__spec__ is not None and timing.__spec__.name == "mpitrain.tools.bench.timing"
    assert new_path("mpitrain.benchmark") is None


def test_a_program_that_has_moved_starts_by_its_old_path() -> None:
    line = [sys.executable, "-m", "mpitrain.config.page"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith("# All settings"), result.stderr
