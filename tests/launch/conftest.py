"""Runs of the main job that several tests look at, each made when it is first asked for."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from main_job import trained

TEXT = "def class return self import for in if else not None True = ( ) : + [ ] . , x y z node rank shard buffer"


def numbers() -> Iterator[int]:
    """Knuth's linear congruence. Not `random`, of whose methods only one keeps its numbers across versions of Python."""
    state = 1
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33  # the low bits repeat soon


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """110 kB of text with some structure: enough for an epoch to be longer than any run here. The same bytes everywhere."""
    words, drawn = TEXT.split(), numbers()
    bag = [
        word for index, word in enumerate(words) for _ in range(len(words) - index)
    ]  # the first is the most frequent
    lines = [" ".join(bag[next(drawn) % len(bag)] for _ in range(2 + next(drawn) % 8)) for _ in range(5000)]
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_bytes("\n".join(lines).encode())
    return file


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[int], Path]:
    """The folder of a run on so many ranks that nothing interrupted; beside it, ending in .out, what it printed. Not to be changed."""
    made: dict[int, Path] = {}

    def get(num_ranks: int) -> Path:
        if num_ranks not in made:
            folder = tmp_path_factory.mktemp("runs") / f"on-{num_ranks}"
            result = trained(num_ranks, folder, corpus)
            folder.with_suffix(".out").write_text(result.stdout.replace("\r\n", "\n"))
            made[num_ranks] = folder
        return made[num_ranks]

    return get
