"""Each command of the three packages is started once, with little to do. What it does is the subject of other tests."""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import ROOT, Result, job_environment, launch, run

from mpitrain.cli import USAGE

MODEL = "--model.width 32 --model.layers 2 --model.heads 2 --model.context 32"
RUN = f"{MODEL} --data.path {{text}} --train.steps 6 --train.batch 4 --train.eval-batches 1 --train.sample-bytes 0 --log.every 1"
SIZES = "--width 32 --layers 1 --heads 2 --context 16"


class Started(NamedTuple):
    """The options of a command, what it prints, the number of ranks (0: without mpirun), and the exit code."""

    options: str
    says: str
    ranks: int = 0
    code: int = 0


COMMANDS = {
    "mpitrain": Started(f"--run {{room}}/plain {RUN}", "step 6/6", 2),
    "mpitrain elastic": Started(f"-- {{mpirun}} -np 1 {{python}} -m mpitrain --run {{room}}/elastic {RUN}", "step 6/6"),
    "mpitrain tokenizer train": Started(
        "--data.path {text} --vocab-size 300 --out {room}/tokenizer.json", "300 tokens"
    ),
    "mpitrain tokenize": Started(
        "--data.path {text} --data.tokenizer {tokenizer} --out {room}/tokens", "train on them", 2
    ),
    "mpitrain sample": Started("--checkpoint {trained} --bytes 4 --prompt def", "def"),
    "mpitrain bench": Started(f"{SIZES} --steps 2 --peers none", "tokens/s", 2),
    "mpitrain bench bits": Started(
        "--cases resumed --models gpt --steps 4 --stops 2 --settings '--parallel.storage private' --folder {room}",
        "the same bits",
    ),
    "mpitrain bench calls": Started("--np 1 -- {python} -c 'print(\"step 1/1\", flush=True)'", "calls of 1 rank"),
    "mpitrain bench data": Started("--rounds 1 --steps 5 --only waiting --folder {room}", "documents"),
    "mpitrain bench monitoring": Started("--rounds 1 --steps 3 --most-steps 60", "metrics.jsonl"),
    "mpitrain bench batch-norm": Started("--rounds 1", "", 2),
    "mpitrain bench muon": Started("--width 16 --layers 1 --steps 1 --threads 1", "", 2),
    "mpitrain bench wire": Started("--shape 32x1x1 --heads 2 --context 16 --steps 1 --stages 0 --wires fp32", "", 2),
    "mpitrain bench losses": Started(
        f"--steps 2 --cases exact --json {{room}}/losses.json --settings '{MODEL} --data.path {{text}}'", "exact", 2
    ),
    "mpitrain bench compression": Started("--width 32 --layers 1 --rounds 1 --threads 1", "", 2),
    "mpitrain bench --report": Started("{step}", "tokens/s"),
    "mpitrain memory": Started(f"--np 2 {MODEL}", "MB"),
    "mpitrain plan": Started("--model llama3-8b --ranks 64 --machine h100 --batch 64", "ms"),
    "mpitrain watch": Started("{trained} --once", "finished"),
    "mpitrain report": Started("{trained} --out {room}/report.html", "report.html"),
    "mpitrain diff": Started("{trained} {trained}", ""),
    "mpitrain stop": Started("{trained}", "", code=1),
    "mpitrain trace": Started("{trained} --draw {room}/trace.svg", "trace.svg"),
    "mpitrain profile": Started("{trained}", "what to try"),
    "mpitrain schedules": Started("show 1f1b", "idle"),
    "mpitrain doctor": Started("", "exit code 0"),
    "collectives check": Started("--ranks 2..5", "Proved"),
    "collectives cost": Started("--ranks 8 --sizes 1MiB", "ring"),
    "collectives info": Started("", "ranks", 2),
    "collectives bench": Started("--op all_reduce --sizes 1KiB --rounds 1 --json {room}/bench.json", "all_reduce", 2),
    "collectives tune": Started("--op all_reduce --sizes 1KiB --output {room}/table.json", "table.json", 2),
    "collectives report": Started("{bench}", "1 launch"),
    "ckpt ls": Started("{trained}/checkpoints", "step-00000006"),
    "ckpt show": Started("{checkpoint}", "float32"),
    "ckpt diff": Started("{checkpoint} {checkpoint}", ""),
    "ckpt verify": Started("{checkpoint}", ""),
    "ckpt export": Started("{checkpoint} {room}/exported.safetensors", ""),
    "ckpt import": Started("{weights} {room}/imported", ""),
    "ckpt reshard": Started("{checkpoint} {room}/one --files 1", ""),
    "ckpt gc": Started("{trained}/checkpoints", ""),
    "ckpt bench": Started("--peers posix --size 1MB --rounds 1 --dir {room}", "POSIX", 2),
}

ELSEWHERE = {
    "mpitrain bench recovery": "launch/mpitrain/test_recovery_bench.py::test_they_recover_and_have_figures",
    "mpitrain chaos": "launch/mpitrain/test_chaos.py::test_a_harmed_job_does_what_is_expected",
    "mpitrain bench clocks": "mpi/monitor/test_trace.py::test_clocks_of_hosts",
    "mpitrain pack": "launch/mpitrain/test_pack.py::test_the_command_refuses_what_it_would_destroy",
    "mpitrain plan --measure": "mpi/plan/test_compare.py::test_measure_and_compare",
    "mpitrain plan --compare": "mpi/plan/test_compare.py::test_measure_and_compare",
}
"""The tests of the core that start commands which need hosts, a small environment, or much time."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, str]:
    """What stands in the options: a folder for all, files that a command reads, and the folder of a run with a trace."""
    room = tmp_path_factory.mktemp("commands")
    trained = room / "trained"
    made = {"room": room, "text": corpus, "python": sys.executable, "mpirun": job_environment(2)[0], "trained": trained}
    made |= {"checkpoint": trained / "checkpoints/step-00000006", "weights": room / "weights.safetensors"}
    made |= {"bench": room / "bench.json", "step": room / "step.json"}
    made["tokenizer"] = room / "made/tokenizer.json"
    found = {name: shlex.quote(str(value)) for name, value in made.items()}
    of_others = {
        "mpitrain": Started(f"--run {{trained}} {RUN} --log.trace-steps 5:6", "", 2),
        "mpitrain bench": Started(f"{SIZES} --steps 2 --peers none --json {{step}}", "", 2),
        "collectives bench": Started("--op all_reduce --sizes 1KiB --rounds 1 --json {bench}", "", 2),
        "ckpt export": Started("{checkpoint} {weights}", ""),
        "mpitrain tokenizer train": Started("--data.path {text} --vocab-size 300 --out {tokenizer}", ""),
    }
    for name, command in of_others.items():
        assert (result := start(name, command, found)).returncode == 0, str(result)
    return found


def start(name: str, command: Started, places: dict[str, str]) -> Result:
    package, *words = name.split()
    arguments = ["-m", package, *words, *shlex.split(command.options.format_map(places))]
    if command.ranks:
        return launch(command.ranks, *arguments, cwd=ROOT, timeout_s=100)
    settings = job_environment(1)[1] if words == ["elastic"] else {}
    return run([sys.executable, *arguments], cwd=ROOT, env=settings | {"PYTHONPATH": str(ROOT)}, timeout_s=100)


@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends_well(name: str, places: dict[str, str]) -> None:
    result = start(name, COMMANDS[name], places)
    assert result.returncode == COMMANDS[name].code, str(result)
    assert COMMANDS[name].says in result.stdout + result.stderr, str(result)


def test_all_commands_of_the_packages_are_here() -> None:
    usage = re.findall(r"python -m (mpitrain .*?)(?:  |$)", USAGE, re.MULTILINE)
    arguments = r" (\[|[A-Z]|--(np|out|checkpoint|model) |check|\(|\||settings|-- ).*"
    named = {re.sub(" [A-Z].*", "", re.sub(arguments, "", line.replace(" | --compare FILE", ""))) for line in usage}
    for package in ("collectives", "ckpt"):
        shown = run([sys.executable, "-m", package, "--help"], cwd=ROOT).stdout
        named |= {f"{package} {name}" for name in re.findall("^    ([a-z]+)  ", shown, re.MULTILINE)}
    assert named | {"mpitrain plan --compare"} == COMMANDS.keys() | ELSEWHERE.keys()
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        before, found, _ = (ROOT / "tests" / file).read_text().partition(f"def {name}(")
        marks = [before.rpartition("\n\n\n")[2], *re.findall("^pytestmark = .*", before, re.MULTILINE)]
        assert found and not any("mark.rest" in each for each in marks), f"{test} is not in the core"
