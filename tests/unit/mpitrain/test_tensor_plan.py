"""Plans: which modules a pattern names."""

import pytest

from mpitrain.tensor.plan import Style, styles_of

COLUMN, ROW = Style("column"), Style("row")
NAMES = ["", "wte", "blocks", "blocks.0", "blocks.0.fc", "blocks.0.attn.fc", "blocks.1.fc"]


def test_a_star_is_one_part_of_a_name_and_the_first_pattern_counts() -> None:
    found = styles_of(NAMES, {"blocks.1.fc": ROW, "blocks.*.fc": COLUMN, "wte": Style("vocabulary")})
    assert found == {"wte": Style("vocabulary"), "blocks.0.fc": COLUMN, "blocks.1.fc": ROW}


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no module of the model matches 'blocks\.\*\.gate', 'head' of the plan"):
        styles_of(NAMES, {"blocks.*.gate": COLUMN, "head": COLUMN, "wte": COLUMN})
