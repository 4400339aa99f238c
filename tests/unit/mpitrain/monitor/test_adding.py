"""`mpitrain.log` and `log.modules`: what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpitrain
from mpitrain.job.config import ConfigError
from mpitrain.job.record.adding import Added, import_modules


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"figures": "x"}, TypeError, "expected a mapping of names to numbers, got str"),
        ({"figures": {"x": "1"}}, TypeError, "expected names with numbers, got 'x': str"),
        ({"figures": {"x": [1]}}, TypeError, "expected names with numbers, got 'x': list"),
        ({"figures": {"x": np.ones(2)}}, TypeError, "expected names with numbers, got 'x': ndarray"),
        ({"figures": {"x": 10**400}}, TypeError, "expected names with numbers, got 'x': int"),
        ({"figures": {"": 1}}, TypeError, "expected names that can be printed, got ''"),
        ({"figures": {"a\n": 1}}, TypeError, r"expected names that can be printed, got 'a\\n'"),
        (
            {"figures": {"loss": 1.0}},
            ValueError,
            "'loss' is a figure of the run itself; choose another name, such as my/loss",
        ),
        ({"sink": 3}, TypeError, "expected a sink, an object of a class of mpitrain.Sink, got int"),
        ({"sink": mpitrain.Sink}, TypeError, "got the class Sink"),
        ({"callback": "x"}, TypeError, "expected a callback, an object of a class of mpitrain.Callback, got str"),
    ],
)
def test_what_is_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        mpitrain.log(**given)
    assert not Added.figures and not Added.sinks and not Added.callbacks


def test_modules_with_errors_are_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("x = 1\n\nraise ValueError('boom')\n")
    (tmp_path / "wrong.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(ConfigError, match=r"log\.modules: .*raises\.py, line 3: ValueError: boom"):
        import_modules([str(tmp_path / "raises.py")])
    with pytest.raises(ConfigError, match=r"log\.modules: .*wrong\.py, line 2: SyntaxError: invalid syntax"):
        import_modules([str(tmp_path / "wrong.py")])
    with pytest.raises(ConfigError, match="there is no file"):
        import_modules([str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match="got nowhere_at_all, which is neither"):
        import_modules(["nowhere_at_all"])
