"""All pages, read as a reader reads them: in order, in one fresh folder, each command and each program as it stands.

tests/docs/table.py says what is shortened, what a page needs before, and for what does not run here why. Without MPITRAIN_TEST_FULL=1
only what table.SHORT names runs; the other tests of this folder look at all pages.
"""

import ast
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import table
from extent import FULL
from launching import ROOT, YIELDS, Result, job_environment, own_segments, own_session, run
from pages import BLOCKS, Block, Command, blocks, commands, pages
from shapes import kind, missing, words
from table import entry

SHELLS = ("commands", "session")
STEPS: list[Block | Command] = [
    step for block in BLOCKS for step in (commands(block) if block.kind in SHELLS else [block])
]


class Reader:
    """Somebody with a checkout, a home folder and a shell, who tries what the pages say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}  # of the commands so far, by their text on the page
        self.prepared: set[str] = set()
        home = folder / "home"
        home.mkdir(parents=True)
        for name in (".venv", "examples", "docs", "tests", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        for path in (ROOT / "mpirun").iterdir():  # not links: a script finds its checkout by its own place
            script = folder / "mpirun" / path.name
            script.parent.mkdir(exist_ok=True)
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(path))} "$@"\n')
            script.chmod(0o755)
        cache = home / ".cache/mpitrain"
        if (ROOT / "tests/cache").is_dir():  # what other tests have compiled
            shutil.copytree(ROOT / "tests/cache", cache)
        _, settings = job_environment(1)
        plain = {
            name: value for name, value in settings.items() if not name.startswith(("PRTE_", "OMPI_", "VIRTUAL_ENV"))
        }
        # a reader is not root, and this MPI starts a second faster without a transport that no machine of the tests has
        quick = {
            name: value for name, value in settings.items() if name.startswith(("OMPI_ALLOW", "OMPI_MCA_btl", *YIELDS))
        }
        path = ":".join(part for part in plain["PATH"].split(":") if not part.startswith(str(ROOT)))
        own = {"PATH": path, "HOME": str(home), "MPITRAIN_CACHE_DIR": str(cache), "COLUMNS": "120"}
        self.environment = {**plain, **quick, **own}

    def shell(self, text: str, timeout_s: float) -> Result:
        """What a command prints. What it sets stays for the next ones."""
        left = self.folder / "home/environment"
        script = f"{text}\ncode=$?\nenv -0 > {shlex.quote(str(left))}\nexit $code"
        with own_session() as session, own_segments() as segments:
            environment = {**self.environment, **session, **segments}
            command = ["bash", "-o", "pipefail", "-c", script]
            result = run(command, env=environment, cwd=self.folder, timeout_s=timeout_s)
        if left.exists():
            pairs = (pair.split("=", 1) for pair in left.read_text().rstrip("\0").split("\0"))
            self.environment = {name: value for name, value in pairs if name not in (*session, *segments, "_", "SHLVL")}
            left.unlink()
        return result

    def prepare(self, page: str) -> None:
        if page != "README.md" and "VIRTUAL_ENV" not in self.environment:
            for step in STEPS:
                if step.key.startswith(table.SHELL):
                    self.shell(step.text, timeout_s=20)
        for block in blocks(page):
            if name := entry(table.FILES, block):
                (self.folder / name).write_text(block.text)
        for name in table.NEEDS.get(page, ()):
            if name not in self.prepared and not (self.folder / name).exists():
                self.prepared.add(name)
                result = self.shell(table.MADE[name], timeout_s=100)
                expect(result.returncode == 0, f"{name}, which {page} needs: {result}")


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    yield Reader(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.rest
@pytest.mark.timeout_s(table.TIMEOUT_S + 110)
@pytest.mark.parametrize(
    "step", [step for step in STEPS if entry({**table.LEFT_OUT, **table.FILES}, step) is None], ids=str
)
def test_what_a_page_says_works(reader: Reader, step: Block | Command) -> None:
    if not FULL and not step.key.startswith(table.SHORT):
        pytest.skip("only with MPITRAIN_TEST_FULL=1")
    reader.prepare(step.page)
    if isinstance(step, Command):
        check_command(reader, step)
    elif step.kind in ("python", "prompt"):
        check_program(reader, step)
    elif step.kind == "toml":
        check_file(reader, step)
    else:
        check_shown(reader, step)


def check_command(reader: Reader, command: Command) -> None:
    text = shortened(command.text, command.page)
    result = reader.shell(text, table.TIMEOUT_S)
    output = (result.stdout + result.stderr).replace("\r\n", "\n")
    reader.printed[command.key] = output
    expected = entry(table.EXIT_CODES, command) or 0
    expect(result.returncode == expected, f"{text}\nends with another exit code than {expected}: {result}")
    expect("nothing left to do" not in output, f"{text}\ntrains nothing: {result}")
    expect_lines(command.shown, output, f"{text}\n{result}")


def expect(is_so: bool, message: str) -> None:
    if not is_so:
        pytest.fail(message, pytrace=False)


def expect_lines(shown: Sequence[str], printed: str, context: str, *, exact: bool = False) -> None:
    absent = missing(shown, printed, words if exact else kind, table.FREE)
    expect(not absent, "\n".join(["no lines like these of the page:", *absent, "in the output of", context]))


def shortened(text: str, page: str, rules: Sequence[tuple[str, re.Pattern[str], str]] = table.SHORTER) -> str:
    for start, pattern, replacement in rules:
        if page.startswith(start):
            text = pattern.sub(replacement, text)
    return text


def check_program(reader: Reader, block: Block) -> None:
    source = shortened(block.text if block.kind == "python" else prompt_program(block.text), block.page)
    is_one_of = block.key.startswith(table.ALTERNATIVES)
    programs = [ast.unparse(statement) for statement in ast.parse(source).body] if is_one_of else [source]
    before, after, num_ranks = entry(table.BEFORE, block), entry(table.AFTER, block), entry(table.RANKS, block)
    for program in programs:
        (reader.folder / "program.py").write_text(f"{before or ''}\n{program}\n{after or ''}\n")
        result = reader.shell(f"mpirun -np {num_ranks or 2} python program.py", table.TIMEOUT_S)
        expect(result.returncode == 0, f"{program}\n{result}")
        printed = result.stdout.replace("\r\n", "\n")
        reader.printed[block.key] = printed
        if block.kind == "prompt":
            shown = [line for line in block.text.splitlines() if not line.startswith((">>> ", "... "))]
            expect_lines(shown, printed, f"{program}\n{result}")


def prompt_program(text: str) -> str:
    """A program that does what is typed after each ">>> "."""
    typed = "\n".join(line[4:] for line in text.splitlines() if line.startswith((">>> ", "... ")))
    return f"exec(compile({typed!r}, 'typed', 'single'))\n"


def check_file(reader: Reader, block: Block) -> None:
    (reader.folder / "file.toml").write_text(block.text)
    command = entry(table.READ_BY, block)
    expect(command is not None, "no entry of the table says what reads this file")
    result = reader.shell(command.replace("FILE", "file.toml"), table.TIMEOUT_S)
    expect(result.returncode == 0, f"{command}\n{result}")


def check_shown(reader: Reader, block: Block) -> None:
    """A block that shows what an earlier command of the page prints."""
    source = entry(table.SHOWN, block)
    expect(source is not None, "no entry of the table says what prints this, or why nothing does")
    printed = [output for start, output in reader.printed.items() if start.startswith(f"{block.page}: {source}")]
    expect(bool(printed), f"'{source}', which prints this, has not run")
    exact = block.key.startswith(table.EXACT)
    expect_lines(block.text.splitlines(), printed[-1], f"{source}\n{printed[-1]}", exact=exact)


def test_each_entry_of_the_table_is_for_a_block() -> None:
    entries = (
        table.LEFT_OUT,
        table.FILES,
        table.BEFORE,
        table.AFTER,
        table.RANKS,
        table.SHOWN,
        table.EXIT_CODES,
        table.READ_BY,
    )
    starts = [
        start
        for each in (*entries, table.SHORT, table.ALTERNATIVES, table.EXACT, table.EXAMPLES, table.SHELL)
        for start in each
    ]
    unused = [start for start in starts if not any(step.key.startswith(start) for step in STEPS)]
    assert not unused, f"no block begins as {unused}"
    assert set(table.NEEDS) <= set(pages())
    assert {name for names in table.NEEDS.values() for name in names} == set(table.MADE)
    lines = [line for block in BLOCKS for line in block.text.splitlines()]
    assert all(any(line.startswith(start) for line in lines) for start in table.FREE)


@pytest.mark.parametrize("rule", table.SHORTER, ids=lambda rule: rule[1].pattern[:40])
def test_each_rule_shortens_something(rule: tuple[str, re.Pattern[str], str]) -> None:
    start, pattern, _ = rule
    earlier = table.SHORTER[: table.SHORTER.index(rule)]
    texts = [shortened(step.text, step.page, earlier) for step in STEPS if step.page.startswith(start)]
    assert any(pattern.search(text) for text in texts), f"no command of {start or 'any page'} has {pattern.pattern}"


def test_reasons_name_tests_that_exist() -> None:
    for reason in table.LEFT_OUT.values():
        for path in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / path).is_file(), reason
