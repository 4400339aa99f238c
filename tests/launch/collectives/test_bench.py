"""`python -m collectives bench | tune | report` and `python -m mpitrain bench` as real jobs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from extent import extent
from launching import ROOT, Result, collectives_alone, launch

from collectives.selection.table import Table, TableEntry

WIDE = {"COLUMNS": "120"}


def collectives(num_ranks: int, *arguments: str, cache: Path | None = None) -> Result:
    env = WIDE if cache is None else {**WIDE, "MPITRAIN_CACHE_DIR": str(cache)}
    return launch(num_ranks, "-m", "collectives", *arguments, cwd=ROOT, env=env, timeout_s=60)


# bench


@pytest.mark.rest
def test_bench_measures_every_contestant(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--op", "all", "--dtype", "float32,bfloat16", "--sizes", "20KiB", "--rounds", "3"]
    wanted = ["--peers", "mpi,gloo", "--json", str(file), "--plot", str(picture)]
    result = collectives(2, "bench", *arguments, *wanted)
    assert result.returncode == 0, str(result)
    figures = json.loads(file.read_text())
    assert (figures["ranks"], figures["nodes"], figures["arrays"]) == (2, 1, "numpy")
    measured: dict[tuple[str, str, int], dict[str, set[str]]] = {}
    for row in figures["results"]:
        case = measured.setdefault((row["operation"], row["dtype"], row["nbytes"]), {})
        case.setdefault(row["memory"], set()).add(row["algorithm"])
        assert 0 < row["seconds"] < 5 and row["rounds"] == 3
        assert row["algbw"] == pytest.approx(row["nbytes"] / row["seconds"])
        factor = 1.0 if row["operation"] in ("all_reduce", "broadcast", "reduce") else 0.5  # 2 ranks
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
        assert f"{row['seconds'] * 1e6:.1f}" in result.stdout
    assert len(measured) == 8 * 2
    for (operation, dtype, nbytes), by_memory in measured.items():
        assert result.stdout.count(f" {operation}, {dtype}, 2 ranks on 1 node") == 1, str(result)
        assert nbytes == 20480
        reducing = operation in ("all_reduce", "reduce_scatter", "reduce")
        expected = {"auto", "mpi", "gloo"} | ({"raw mpi4py"} if dtype == "float32" or not reducing else set())
        assert expected <= by_memory["private"], (operation, dtype)
        if operation in ("all_reduce", "all_gather", "reduce_scatter"):
            assert "ring" in by_memory["private"]
            assert by_memory["node"] == {"auto", "shared"}
        assert ("in place" in by_memory) == (operation == "all_gather")
    assert "reduce, bfloat16: skipped raw mpi4py on private memory: MPI has no bfloat16 to reduce" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.rest
def test_bench_on_torch_tensors_and_the_overhead_of_a_call(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--sizes", "1KiB", "--seconds", "0.1", "--arrays", "torch", "--overhead", "--dtype", "uint16"]
    result = collectives(3, "bench", *arguments, "--peers", "mpi,gloo", "--memory", "private", "--json", str(file))
    assert result.returncode == 0, str(result)
    figures = json.loads(file.read_text())
    assert {row["memory"] for row in figures["results"]} == {"private"}
    assert {row["nbytes"] for row in figures["results"]} == {1020}, "whole elements on 3 ranks"
    assert "skipped gloo on private memory: gloo has no all_reduce of uint16: " in " ".join(result.stdout.split())
    over = [(row["arrays"], row["algorithm"]) for row in figures["overhead"]]
    assert over == [("numpy", "mpi"), ("numpy", "auto"), ("torch", "mpi"), ("torch", "auto")]
    for row in figures["overhead"]:
        assert 0 < row["raw_seconds"] < 0.1 and 0 < row["seconds"] < 0.1
    assert "Python time per call, 3 ranks on 1 node" in result.stdout


def test_a_plot_without_matplotlib_is_one_line_before_anything_is_measured(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\nfrom collectives.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    picture = tmp_path / "a.png"
    result = launch(2, "-c", script, "bench", "--plot", str(picture), cwd=ROOT, timeout_s=30)
    assert result.returncode != 0, str(result)
    assert result.stderr.count("collectives: --plot needs matplotlib: pip install") == 1, str(result)
    assert result.stdout == "" and not picture.exists()


# report


@pytest.mark.rest
def test_report_needs_no_mpi(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{i}.json") for i in range(2)]
    for file in files:
        result = collectives(2, "bench", "--sizes", "1KiB", "--rounds", "2", "--json", file)
        assert result.returncode == 0, str(result)
    shown = collectives_alone("report", *files)
    assert shown.returncode == 0, shown.stderr
    assert "all_reduce, float32, private memory, 2 ranks on 1 node, 2 launches" in " ".join(shown.stdout.split())
    written = tmp_path / "report.md"
    assert collectives_alone("report", *files, "--markdown", str(written)).returncode == 0
    assert "| 1 KiB | " in written.read_text()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for file, text in (
        (broken, "is no file of `python -m collectives bench --json`"),
        (tmp_path / "none", "No such file"),
    ):
        refused = collectives_alone("report", str(file))
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
        assert text in refused.stderr


# tune, and the table in force

TABLES = """
import json, sys, collectives
comm = collectives.world()
half = comm.split(comm.rank // 2)
tables = comm.all_gather_object([c.table.to_dict() for c in (comm, comm.node, half)])
assert all(table == tables[0][0] for of_rank in tables for table in of_rank), tables
if comm.rank == 0:
    print(json.dumps(tables[0][0]))
"""


def table_in_force(num_ranks: int, cache: Path) -> tuple[Table, str]:
    """The table that all ranks of a new job have, and what stands on stderr."""
    env = {"MPITRAIN_CACHE_DIR": str(cache)}
    result = launch(num_ranks, "-c", TABLES, cwd=ROOT, env=env, timeout_s=30)
    assert result.returncode == 0, str(result)
    return Table.from_dict(json.loads(result.stdout.splitlines()[-1])), result.stderr


@pytest.mark.rest
def test_what_tune_has_measured_is_used_by_all_ranks_of_the_next_start(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result = collectives(2, "tune", "--op", "broadcast,reduce", "--sizes", "1KiB,64KiB", "--seconds", "1", cache=cache)
    assert result.returncode == 0, str(result)
    assert "algorithms of auto, 2 ranks on 1 node" in result.stdout
    (file,) = cache.iterdir()
    assert str(file) in result.stdout.replace("\n", "")
    measured = Table.from_dict(json.loads(file.read_text()))
    assert {entry[:5] for entry in measured.entries} == {
        ("broadcast", "native", "private", 2, 1),
        ("reduce", "native", "private", 2, 1),
        ("reduce", "half", "private", 2, 1),
    }
    table, said = table_in_force(2, cache)
    assert set(measured.entries) < set(table.entries)
    assert table.machine == measured.machine is not None
    assert "ignored" not in said
    other, _ = table_in_force(3, cache)
    assert other.machine is None, "measured on other ranks: the built-in one"

    # what was measured before stays when another operation is measured
    changed = [TableEntry(*entry[:5], ((77, "mpi"), (None, "tree"))) for entry in measured.entries]
    file.write_text(Table(tuple(changed), measured.machine).to_json())
    again = collectives(2, "tune", "--op", "broadcast", "--sizes", "1KiB,64KiB", "--seconds", "1", cache=cache)
    assert again.returncode == 0, str(again)
    table, _ = table_in_force(2, cache)
    assert {entry for entry in changed if entry.operation == "reduce"} < set(table.entries)
    assert not {entry for entry in changed if entry.operation == "broadcast"} & set(table.entries)

    file.write_text(file.read_text()[:-40])
    table, said = table_in_force(2, cache)
    assert table.machine is None
    assert said.count("is ignored") == 1 and "remove it, or measure again" in said


@pytest.mark.rest
def test_tune_into_a_file_adds_to_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    for num_ranks in (2, 3):
        arguments = ["--op", "broadcast", "--sizes", "1KiB,64KiB", "--seconds", "1", "--output", str(file)]
        result = collectives(num_ranks, "tune", *arguments, cache=tmp_path / "cache")
        assert result.returncode == 0, str(result)
    table = Table.from_dict(json.loads(file.read_text()))
    assert [(entry.operation, entry.ranks) for entry in table.entries] == [("broadcast", 2), ("broadcast", 3)]
    assert table.machine is None
    assert not (tmp_path / "cache").exists()
    file.write_text("not a table")
    result = collectives(2, "tune", "--op", "broadcast", "--output", str(file))
    assert result.returncode != 0
    assert "table.json exists and is no table: " in result.stderr and "choose another file" in result.stderr, str(
        result
    )
    assert file.read_text() == "not a table"


# a training step beside its peers

TINY = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--steps", "3"]


# DeepSpeed is not to be found, not on a machine that has it either: there it would take part.
STEP_BENCH = "import sys; sys.modules['deepspeed'] = None\nfrom mpitrain.cli import main\nsys.exit(main(['bench', *sys.argv[1:]]))"


def step_bench(num_ranks: int, *arguments: str) -> Result:
    return launch(num_ranks, "-c", STEP_BENCH, *arguments, cwd=ROOT, timeout_s=90)


@pytest.mark.rest
def test_a_training_step_is_measured_beside_its_peers(tmp_path: Path) -> None:
    file, picture, alone_file = (tmp_path / name for name in ("a.json", "a.png", "alone.json"))
    shapes = [*TINY, "--shapes", "32x1x1,16x2x2", "--json", str(file), "--plot", str(picture)]
    result = step_bench(2, *shapes, "--peers", "none,ddp,fsdp,deepspeed")
    assert result.returncode == 0, str(result)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "skipped deepspeed: it is not installed (pip install deepspeed)" in result.stdout
    figures = json.loads(file.read_text())
    assert (figures["ranks"], figures["nodes"], figures["threads"]) == (2, 1, 1)
    assert [(part["case"]["width"], part["case"]["batch"]) for part in figures["measured"]] == [(32, 1), (16, 2)]
    for part in figures["measured"]:
        rows = {row["name"]: row for row in part["rows"]}
        assert list(rows) == ["mpitrain", "none", "ddp", "fsdp"]
        for row in rows.values():
            assert 0 < row["fastest_s"] <= row["step_s"] <= row["slowest_s"] < 5
            assert row["tokens_per_s"] == pytest.approx(2 * part["case"]["batch"] * 16 / row["step_s"])
            known = [seconds or 0.0 for seconds in row["phases"].values()]
            assert 0 < sum(known) < 3 * row["slowest_s"]
            assert row["peak_rss_bytes"] is None, "of a process with several in it"
        # they train together, and the same: a contestant that did less work would show here
        losses = [rows[name]["loss"] for name in ("mpitrain", "ddp", "fsdp")]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
        assert rows["none"]["loss"] != pytest.approx(losses[0], rel=1e-5), "on its own batch alone"
        assert rows["mpitrain"]["phases"]["comm_s"] > 0 and rows["ddp"]["phases"]["comm_s"] is None
        assert rows["ddp"]["state_bytes"] == rows["none"]["state_bytes"]
        assert rows["mpitrain"]["state_bytes"] < 0.6 * rows["none"]["state_bytes"]

    result = step_bench(2, *TINY, "--only", "mpitrain", "--json", str(alone_file))
    assert result.returncode == 0, str(result)
    (row,) = json.loads(alone_file.read_text())["measured"][0]["rows"]
    assert row["peak_rss_bytes"] > row["peak_pss_bytes"] > row["added_pss_bytes"]
    report = [sys.executable, "-m", "mpitrain", "bench", "--report", str(file), str(alone_file)]
    shown = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert f"{row['peak_pss_bytes'] / 1e6:,.0f}" in shown.stdout and "mpitrain / this" in shown.stdout


@pytest.mark.rest
def test_tensor_parallelism_is_measured_beside_torchs(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    cut = ["tensor", "sequence", "torch-tensor", "torch-sequence"]
    result = step_bench(2, *TINY, "--peers", ",".join(["none", *cut]), "--json", str(file))
    assert result.returncode == 0, str(result)
    for name in ("mpitrain", "tensor", "sequence"):
        assert f"{name} / this" in result.stdout
    rows = {row["name"]: row for row in json.loads(file.read_text())["measured"][0]["rows"]}
    assert [rows[name]["loss"] for name in cut] == pytest.approx([rows["mpitrain"]["loss"]] * 4, rel=1e-5)
    for name in cut:
        assert rows[name]["state_bytes"] < 0.7 * rows["none"]["state_bytes"]


@pytest.mark.rest
def test_the_overhead_of_hooks_is_that_of_each_rank_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    fewer_units = f"import mpitrain.tools.bench.overhead\nmpitrain.tools.bench.overhead.UNITS = 20\n{STEP_BENCH}"
    words = ["--overhead", "--steps", "2", "--json", str(file)]
    result = launch(2, "-c", fewer_units, *words, cwd=ROOT, timeout_s=90)
    assert result.returncode == 0, str(result)
    figures = json.loads(file.read_text())
    assert figures["measured"] == [] and figures["overhead"]["units"] == 20
    assert 0 < figures["overhead"]["plain_s"] < figures["overhead"]["plain_step_s"] < 5
    assert "hooks and bookkeeping of 20 units on one rank: forward and backward " in result.stdout


MISTAKES: list[tuple[list[str], str]] = [
    (
        ["--peers", "horovod"],
        "bench: argument --peers: invalid choice: 'horovod'; expected of none, ddp, fsdp, deepspeed",
    ),
    (["--width", "30"], "bench: model.width: expected a multiple of model.heads = 8, got 30"),
    (["--only", "deepspeed"], "bench: --only deepspeed: it is not installed (pip install deepspeed)"),
    (["--json", "/nowhere/a.json"], "No such file or directory: '/nowhere/a.json'"),
]


@pytest.mark.parametrize(("arguments", "message"), extent(MISTAKES[1:2], MISTAKES))
def test_a_mistake_is_one_line_of_all_ranks(arguments: list[str], message: str) -> None:
    result = step_bench(2, *arguments)
    assert result.returncode == 1, str(result)
    assert result.stderr.count("mpitrain: error: ") == 1 and message in result.stderr, str(result)
    assert "Traceback" not in result.stderr and "MPI_ABORT" not in result.stderr, str(result)
