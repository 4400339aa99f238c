"""Runs of the main job that several tests look at, each made when it is first asked for."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from main_job import trained

TEXT = "def class return self import for in if else not None True = ( ) : + [ ] . , x y z node rank shard buffer"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 kB of text with some structure: enough for an epoch to be longer than any run here."""
    rng, words = random.Random(0), TEXT.split()
    lines = [" ".join(rng.choices(words, range(len(words), 0, -1), k=rng.randint(2, 9))) for _ in range(5000)]
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text("\n".join(lines))
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
