"""Environment variables with few values."""

import pytest

from collectives.environment import SWITCHES, check_choices, choice, switch


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_off_or_left_to_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert switch(name) is None
    for said, expected in (("1", True), ("0", False), ("", None), ("auto", None)):
        monkeypatch.setenv(name, said)
        assert switch(name) is expected
        check_choices()
    for said in ("foo", "yes", "2", " 1"):
        monkeypatch.setenv(name, said)
        for read in (lambda: switch(name), check_choices):
            with pytest.raises(ValueError, match=f"{name} is '{said}'; expected 0, 1 or auto"):
                read()


def test_a_choice_is_a_name_or_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("avx2", "avx2"), ("", None), ("auto", None)):
        monkeypatch.setenv("MPITRAIN_CODEC", said)
        assert choice("MPITRAIN_CODEC") == expected
        check_choices()
    monkeypatch.setenv("MPITRAIN_CODEC", "neon")
    with pytest.raises(ValueError, match="MPITRAIN_CODEC is 'neon'; expected numpy, c, avx2, avx512 or auto"):
        check_choices()
