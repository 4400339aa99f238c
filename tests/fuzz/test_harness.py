"""The fuzz tests can fail: each kind of fault of a reader is found and named, its input is kept, and the worker goes on."""

from pathlib import Path
from random import Random

import pytest
from fuzzing import faulty, harness
from fuzzing.mutation import mutate_bytes, mutate_value
from fuzzing.target import fuzzed
from fuzzing.worker import generator

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
