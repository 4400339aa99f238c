"""Environment variables of the value 0 or 1."""

import pytest

from collectives.environment import SWITCHES, check_switches, switch


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_off_or_left_to_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert switch(name) is None
    for said, expected in (("1", True), ("0", False), ("", None), ("auto", None)):
        monkeypatch.setenv(name, said)
        assert switch(name) is expected
        check_switches()
    for said in ("foo", "yes", "2", " 1"):
        monkeypatch.setenv(name, said)
        for read in (lambda: switch(name), check_switches):
            with pytest.raises(ValueError, match=f"{name} is '{said}'; expected 0, 1 or auto"):
                read()
