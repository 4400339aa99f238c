"""Links, lists and tables of the pages are right."""

import inspect
import re
from pathlib import Path

import pytest
from launching import ROOT

from mpitrain.job.config.page import page as page_of_settings

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end with, as GitHub and GitLab make it."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
        if "://" not in target:
            linked = (page.parent / target).resolve() if target else page
            assert linked.exists(), f"{page.name} links to {target}, which is not there"
            assert not heading or heading in anchors(linked), (
                f"{page.name} links to {target}#{heading}, which is not there"
            )


def test_the_list_of_pages_has_each_once() -> None:
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    assert sorted(linked) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


def test_the_places_of_the_architecture_exist() -> None:
    """A file or folder may be named without the folders that it is in."""
    paths = [
        path for package in ("collectives", "ckpt", "mpitrain", "benchmarks") for path in (ROOT / package).rglob("*")
    ]
    known = {
        f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}" for path in (*paths, ROOT / "mpirun")
    }
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(named) > 100
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


def test_the_page_of_settings_is_printed_from_the_code() -> None:
    assert (ROOT / "docs/settings.md").read_text() == page_of_settings(), (
        "python -m mpitrain.job.config.page > docs/settings.md"
    )


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("name", ["fully_shard", "MixedPrecisionPolicy"])
def test_the_tables_of_arguments_are_the_signatures(name: str) -> None:
    import mpitrain

    section = (ROOT / "docs/sharding.md").read_text().partition("## The arguments of fully_shard")[2]
    own, policies = section.partition("## Where full parameters live")[0].split("`MixedPrecisionPolicy` has")
    is_policy = name == "MixedPrecisionPolicy"
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", policies if is_policy else own, re.MULTILINE)
    shown = {argument: cells.split(" | ")[0 if is_policy else 1] for argument, cells in rows}
    parameters = inspect.signature(getattr(mpitrain, name)).parameters
    assert list(shown) == list(parameters)
    for argument, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            default = re.sub("'", '"', repr(parameter.default))
            assert shown[argument].partition(":")[0].strip("`") == default, argument
