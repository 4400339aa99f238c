"""docs/collectives.md shows examples/all_reduce.py and what it prints."""

import re

from launching import ROOT, launch


def test_the_first_call_is_the_example_and_prints_what_the_page_shows() -> None:
    page, example = (ROOT / "docs/collectives.md").read_text(), ROOT / "examples/all_reduce.py"
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)[:2]
    assert example.read_text().partition('"""\n\n')[2] == code, "the page and examples/all_reduce.py differ"
    result = launch(2, str(example), cwd=ROOT, timeout_s=60)
    assert result.returncode == 0, str(result)
    assert sorted(result.stdout.splitlines()) == shown.splitlines(), str(result)
