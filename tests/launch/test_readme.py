"""The README promises what these tests keep."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, launch, run

from mpitrain.config.page import page as page_of_settings

README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs/training.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_is_the_file_and_runs(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "shard_your_model.py").read_text()
    code = example.partition('"""\n\n')[2]  # without its docstring
    assert code in CODE_BLOCKS, "README.md and examples/shard_your_model.py differ"
    result = launch(2, str(ROOT / "examples" / "shard_your_model.py"), cwd=tmp_path)
    assert result.returncode == 0, str(result)
    losses = [float(loss) for loss in re.findall(r"step \d  loss ([\d.]+)", result.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    shown = run([sys.executable, "-m", "ckpt", "show", "example-checkpoints", "model/0.linear1.weight"], cwd=tmp_path)
    assert shown.returncode == 0, str(shown)
    assert "float32 (2048, 256)" in shown.stdout


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


def test_the_page_of_settings_is_printed_from_the_code() -> None:
    assert (ROOT / "docs/settings.md").read_text() == page_of_settings(), (
        "python -m mpitrain.config.page > docs/settings.md"
    )


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_settings_that_the_pages_name_exist() -> None:
    from mpitrain.config import parse

    lines = [
        line.partition("#")[0]
        for line in TRAINING.splitlines()
        if line.startswith("    ") and re.search(r" --(train|data|model|parallel)\.", line)
    ]
    assert len(lines) >= 6
    for line in lines:
        words = re.sub(r" --(np|nodes) \d+", "", line).split()  # of `memory`
        parse(words[next(i for i, word in enumerate(words) if word.startswith("--")) :])


@pytest.mark.parametrize(
    "command",
    # check proves in half a minute what tests/unit/collectives/test_schedules.py does: some ranks here
    [("-m", "collectives", "check", "--ranks", "1..9"), ("-m", "collectives", "info"), ("-m", "mpitrain", "--help")],
)
def test_commands_it_names_run_without_mpirun(command: tuple[str, ...], tmp_path: Path) -> None:
    result = run([sys.executable, *command], cwd=tmp_path)
    assert result.returncode == 0, str(result)
    assert result.stdout


def test_the_table_of_methods_has_those_of_fsdp2() -> None:
    """Those of the installed torch, if it is the version that the page names; "the same" are methods here."""
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import FSDPModule

    from mpitrain.sharding.module import ShardedModule

    before, _, section = (ROOT / "docs/coming.md").read_text().partition("| method | here |\n| --- | --- |\n")
    rows = [row.split(" | ") for row in section.partition("\n\n")[0].splitlines()]
    listed = {name: here for names, here in rows for name in re.findall(r"`(\w+)`", names)}
    same = [name for name, here in listed.items() if here.startswith("the same")]
    assert len(same) == 3 and all(callable(getattr(ShardedModule, name)) for name in same)
    assert not any(hasattr(ShardedModule, name) for name in listed.keys() - set(same))
    if before.rpartition("(torch ")[2].startswith(".".join(torch.__version__.split(".")[:2]) + ")"):
        assert set(listed) == {name for name in vars(FSDPModule) if not name.startswith("_")}


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
