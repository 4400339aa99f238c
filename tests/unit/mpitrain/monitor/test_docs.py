"""The tables of docs/monitoring*.md have the events and metrics that the code writes."""

import ast
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from mpitrain.job.record.adding import RESERVED
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.files.ranks import FIGURES, GAUGES

ROOT = Path(__file__).parents[4]
WRITERS = {"write_event", "_write_event", "_write", "_event", "tell", "_fail"}
"""The functions that get the name of an event and its fields."""
OF_ALL = {"time", "event", "rank", "host", "cost_s"}


def rows(page: str, heading: str) -> dict[str, str]:
    """The rows of the tables below a heading, by each of the names in their first cell."""
    section = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")[2]
    section = re.split(r"\n##* ", section)[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            first, _, rest = line.strip("| ").partition(" | ")
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), rest)
    return found


def written_events() -> dict[str, set[str]]:
    """The fields of each event, by the calls that write it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "mpitrain").rglob("*.py"):
        text = file.read_text()
        if not any(f"{name}(" in text for name in WRITERS):
            continue
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            texts = [each.value for each in call.args if isinstance(each, ast.Constant) and each.value]
            if (
                name in WRITERS
                and len(texts) == 1
                and isinstance(texts[0], str)
                and texts[0].replace("_", "").isalpha()
            ):
                found[texts[0]] |= {each.arg for each in call.keywords if each.arg}
    return found


def test_events() -> None:
    found = written_events()
    found["desync"] = found["flipped_bit"] = {"step", "ranks", "hosts", "what"}  # Health._fail adds them
    documented = {
        event: set(re.findall(r"`(\w+)`", row.split(" | ")[-1]))
        for event, row in rows("monitoring.md", "### Events").items()
    }
    assert documented == {event: its - OF_ALL for event, its in found.items()}


def test_metrics() -> None:
    of_step = {name for name in rows("monitoring-figures.md", "## Each step") if "/" not in name}
    assert of_step == {each.name for each in fields(StepMetrics)} - {"more"} | {"heldout_loss", "heldout_bits_per_byte"}
    assert of_step == RESERVED
    of_ranks = set(rows("monitoring-figures.md", "## Each step, of each rank"))
    assert of_ranks - {"busy_s"} == set(FIGURES) - of_step
    assert list(rows("monitoring-figures.md", "## Every few seconds, of each rank")) == list(GAUGES)
