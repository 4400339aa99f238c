"""The fuzz tests can fail: each kind of fault of a reader is found and named, its input is kept, and the worker goes on."""

import importlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzzing import faulty, harness
from fuzzing.mutation import mutate_bytes, mutate_value
from fuzzing.target import fuzzed, write_files
from fuzzing.worker import check_documents, generator

from mpitrain.job.data.documents.lines import LinesCut, LinesReader
from mpitrain.job.data.documents.tar.reading import TarCut, TarReader
from mpitrain.job.data.documents.tar.sparse import Extents

MODULE = faulty.__name__
SEED = 5


def kind_of(case: int) -> str:
    content = fuzzed(faulty.TARGET, generator(MODULE, SEED, case))["kind"]
    assert isinstance(content, bytes)
    return content.decode()


CASES = {kind_of(case): case for case in reversed(range(1000))}


@pytest.mark.parametrize("kind", faulty.KINDS)
def test_faults_are_found(kind: str, worker: harness.Worker, tmp_path: Path) -> None:
    case = CASES[kind]
    report = harness.run(worker, MODULE, SEED, range(case, case + 1), tmp_path)
    expected = faulty.KINDS[kind][1]
    if not expected:
        assert report.faults == [] and report.refused == (kind != "sound") and report.passed == report.cases == 1
        return
    (fault,) = report.faults
    assert fault.startswith(f"case {case} of faulty {expected}")
    kept = tmp_path / f"faulty-seed-{SEED}-case-{case}"
    assert (kept / "kind").read_text() == kind and f"kept in {kept}" in fault
    assert f"-k faulty --seed {SEED} --case {case}" in fault


def test_mutations_are_the_same_again_and_differ() -> None:
    data, values = bytes(range(256)) * 2 + b'[1, 2,\n{"a": 34}]', [{"a": [1, 2.5, "x", None]}, [True, {"b": 7}]]

    def mutated(seed: int) -> tuple[bytes, str]:
        rng, copied = Random(seed), [{"a": [1, 2.5, "x", None]}, [True, {"b": 7}]]
        mutate_value(rng, copied)
        return mutate_bytes(rng, data), repr(copied)

    found = [mutated(seed) for seed in range(300)]
    assert found == [mutated(seed) for seed in range(300)]
    assert len({part for part, _ in found}) > 250 and len({part for _, part in found}) > 50
    assert sum(part == data for part, _ in found) < 30 and sum(part == repr(values) for _, part in found) < 60


def test_other_documents_than_a_sound_input_was_made_from() -> None:
    check_documents([b"a"], [b"a"])
    check_documents(object(), None)
    with pytest.raises(AssertionError, match=r"\[b'a'\] is read of \[b'a', b'b'\]"):
        check_documents([b"a"], [b"a", b"b"])


def without_the_last(self: LinesCut) -> int:
    return max(len(self._begins) - 1, 0)


def with_another_hole(self: Extents, data: object) -> bytes:
    return bytes(self.size)


FAULTY_READERS: list[tuple[str, type, str, Callable[..., object]]] = [
    ("targets.json_lines", LinesCut, "__len__", without_the_last),
    ("targets.json_lines", LinesReader, "_text_of_python", lambda self, line, error: "x"),
    ("targets.tar_shards", Extents, "read", with_another_hole),
    ("targets.tar_shards", TarReader, "cut", lambda self, begin, end: TarCut(self, [], *[[]] * 4, (0, 0))),
]


@pytest.mark.rest
@pytest.mark.parametrize(("module", "kind", "method", "wrong"), FAULTY_READERS)
def test_other_documents_than_another_program_reads(
    module: str, kind: type, method: str, wrong: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mutated inputs, too."""
    target = importlib.import_module(module).TARGET
    inputs = [fuzzed(target, generator(module, SEED, case)) for case in range(40)]

    def faults() -> int:
        found = 0
        for number, files in enumerate(inputs):
            folder = tmp_path / str(number) / "input"
            folder.mkdir(parents=True, exist_ok=True)
            write_files(files, folder)
            try:
                target.read(folder)
            except AssertionError:
                found += 1
            except (ValueError, OSError):
                continue
        return found

    assert faults() == 0
    monkeypatch.setattr(kind, method, wrong)
    assert faults() > 0
