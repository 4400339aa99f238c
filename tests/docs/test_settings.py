"""What the pages say without running it: settings that exist, ranks that fit them, a folder for each run, examples that are files."""

import ast
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
import table
from launching import ROOT
from pages import BLOCKS, Block, Command, commands

from mpitrain.job.config import parse
from mpitrain.job.config.ranks import check_ranks

COMMANDS = [
    command for block in BLOCKS if block.kind in ("commands", "session", "script") for command in commands(block)
]
JOB = re.compile(
    r"(?:mpirun (?P<options>.*?)|srun .*?)python(?: -P)? -m mpitrain(?= --)(?P<plain>.*)"
    r"|mpirun/train(?: -np (?P<ranks>\d+))?(?P<train>.*)|mpirun/elastic.*? --(?= --)(?P<elastic>.*)",
    re.DOTALL,
)


def jobs() -> list[tuple[Command, list[str], int | None]]:
    """Of each command that trains: its settings, and its number of ranks if the command has it."""
    found = []
    for command in COMMANDS:
        if not (match := JOB.search(command.text)):
            continue
        settings = match["plain"] or match["train"] or match["elastic"] or ""
        ranks = match["ranks"] or next(iter(re.findall(r"-np (\d+)", match["options"] or "")), None)
        found.append((command, shlex.split(settings.replace("\\\n", ""), comments=True), int(ranks) if ranks else None))
    return found


JOBS = jobs()


def test_there_are_jobs() -> None:
    assert len(JOBS) > 50


@pytest.mark.parametrize(("command", "settings", "ranks"), JOBS, ids=[str(job[0]) for job in JOBS])
def test_the_settings_exist_and_fit_the_ranks(command: Command, settings: list[str], ranks: int | None) -> None:
    config = parse(settings)
    if ranks is not None:
        check_ranks(config, ranks)


def test_each_run_has_a_folder_of_its_own() -> None:
    commands_of = defaultdict(list)
    for command, settings, _ in JOBS:
        if "--train.eval-only" not in settings:  # looks at an earlier run
            commands_of[parse(settings).run].append(str(command))
    shared = {run: commands for run, commands in commands_of.items() if len(commands) > 1 and run not in table.GOES_ON}
    assert not shared, f"a second run there would train nothing: {shared}"


@pytest.mark.parametrize("example", sorted(table.EXAMPLES))
def test_an_example_is_a_file(example: str) -> None:
    file = (ROOT / table.EXAMPLES[example]).read_text()
    code = file.partition('"""\n\n')[2]  # without its docstring
    assert any(block.key.startswith(example) and block.text == code for block in BLOCKS), (
        f"{example.partition(':')[0]} and {table.EXAMPLES[example]} differ"
    )


EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sbatch", ".pbs", ".yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_settings_of_an_example_exist(path: Path) -> None:
    for name, value in re.findall(r"(--[a-z]+\.[\w.-]+) ([^\s\"(]+)", path.read_text()):
        parse([name, value])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "python"], ids=str)
def test_a_program_is_python(block: Block) -> None:
    ast.parse(block.text)
