"""`python -m mpitrain bench data`."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.data import samples, waiting
from benchmarks.data.readers import READERS
from collectives.bench.kit.turns import drawn_order
from collectives.shared.arguments import names_of
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive
from mpitrain.job.config import DataConfig
from mpitrain.job.data.tokenizers import load_tokenizer

_TOTAL_BYTES = {4_000: 100_000_000, 100_000: 200_000_000}
"""The text that is read, by the mean size of a document."""
_WAITING_BYTES, _RESUME_BYTES = 40_000_000, 200_000_000


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain bench data",
        description="Read the same documents by this library and by others, in turn, on one core; then time steps of 100 ms that wait "
        "for their rows. One process, without mpirun.",
    )
    parser.add_argument("--only", type=names_of(["reading", "waiting", "resume"]), metavar="PART,..",
                        default=["reading", "waiting", "resume"], help="reading, waiting, resume")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=40, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json for the steps, besides bytes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each turn to FILE, one JSON object a line")
    parser.add_argument("--folder", help="where the documents are written (default: the folder for temporary files)")
    given = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mpitrain-data.", dir=given.folder) as room:
        if "reading" in given.only:
            rows += _reading(Path(room), given.rounds)
        if "waiting" in given.only:
            rows += _waiting(Path(room), given)
        if "resume" in given.only:
            rows += _resume(Path(room), given)
    if given.json:
        with given.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def _reading(room: Path, rounds: int) -> list[dict[str, Any]]:
    """Megabytes of text a second on one core."""
    there = {name: reader for name, reader in READERS.items() if not reader.lacks}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rows: list[dict[str, Any]] = []
    for mean_bytes, total_bytes in _TOTAL_BYTES.items():
        shards = samples.dealt(mean_bytes, total_bytes)
        for name, reader in there.items():
            folder = room / f"{name.replace(' ', '-')}-{mean_bytes}"
            folder.mkdir()
            reader.write(folder, shards)
        del shards
        turns = [(name, shuffled) for name in there for shuffled in (False, True)]
        for number in range(rounds + 1):  # the first one reads the files into memory
            for i in drawn_order(number, len(turns)):
                name, shuffled = turns[i]
                began = time.perf_counter()
                sizes = [
                    len(text) for text in there[name].read(room / f"{name.replace(' ', '-')}-{mean_bytes}", shuffled)
                ]
                seconds = time.perf_counter() - began
                row = {"part": "reading", "name": name, "mean_bytes": mean_bytes, "shuffled": shuffled, "round": number}
                if number:
                    rows.append({**row, "bytes": sum(sizes), "samples": len(sizes), "seconds": seconds})
    os.sched_setaffinity(0, cores)
    print(_reading_table(rows))
    for name, reader in READERS.items():
        if reader.lacks:
            print(f"{name} has no row: {', '.join(reader.lacks)} is not installed")
    return rows


def _reading_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        line: list[str] = [name]
        for mean_bytes in _TOTAL_BYTES:
            for shuffled in (False, True):
                its = [r for r in rows if (r["name"], r["mean_bytes"], r["shuffled"]) == (name, mean_bytes, shuffled)]
                rate = median(row["bytes"] / 1e6 / row["seconds"] for row in its)
                line.append(f"{rate:.0f} ({median(row['samples'] / row['seconds'] for row in its):.0f})")
        lines.append(line)
    kinds = [f"{size // 1000} kB, {how}" for size in _TOTAL_BYTES for how in ("in order", "shuffled")]
    return markdown_table(("MB/s (samples/s) of one core", *kinds), lines)


def _waiting(room: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The wait of a step of 100 ms, and its time beside one with a file of tokens."""
    folder = _jsonl(room)
    steps = waiting.Steps()
    rows: list[dict[str, Any]] = []
    for tokenizer in ["bytes", *([given.tokenizer] if given.tokenizer else [])]:
        made = waiting.recipe(folder, _tokenizer(tokenizer))
        with ExitStack() as files:
            tokens = files.enter_context(waiting.token_file(made, given.steps, room / "rows.npy"))
            for number in range(given.rounds):
                for i in drawn_order(number, 3):
                    with ExitStack() as ended:
                        get = tokens if i == 2 else ended.enter_context(waiting.documents(made, i))
                        step_s, wait_s = steps.run(get, given.steps)
                    name = ("documents", "documents, tokenized ahead", "token file")[i]
                    rows.append({"part": "waiting", "tokenizer": Path(tokenizer).name, "name": name, "round": number,
                                 "step_s": step_s, "wait_s": wait_s})  # fmt: skip
    lines = []
    for tokenizer, name in dict.fromkeys((row["tokenizer"], row["name"]) for row in rows):
        its = [row for row in rows if (row["tokenizer"], row["name"]) == (tokenizer, name)]
        files_ = {r["round"]: r["step_s"] for r in rows if (r["tokenizer"], r["name"]) == (tokenizer, "token file")}
        lines.append((
            f"{name}, {tokenizer}", f"{median(100 * row['wait_s'] / row['step_s'] for row in its):.2f}",
            f"{median(row['step_s'] for row in its) * 1e3:.1f}",
            f"{median(row['step_s'] / files_[row['round']] for row in its):.3f}",
        ))  # fmt: skip
    headings = (f"{waiting.ROWS} rows of {waiting.CONTEXT} tokens", "wait %", "step ms", "to the token file's step")
    print(markdown_table(headings, lines))
    return rows


def _resume(room: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The first batch after a resume, by the kind of shard."""
    rows: list[dict[str, Any]] = []
    writers = {"tar": samples.write_tar, "jsonl": samples.write_jsonl, "parquet": samples.write_parquet}
    for kind, write in writers.items():
        if kind == "parquet" and READERS["mpitrain parquet"].lacks:
            continue
        (folder := room / f"resume-{kind}").mkdir()
        for number, shard in enumerate(samples.dealt(4_000, _RESUME_BYTES)):
            write(folder / f"{number:03}.{kind}", shard)
        for number in range(given.rounds):
            for num_processes in (0, 1):
                seconds = waiting.first_batch_s(folder, _tokenizer(given.tokenizer or "bytes"), num_processes)
                rows.append({"part": "resume", "kind": kind, "processes": num_processes, "round": number, "s": seconds})
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        taken = [[row["s"] for row in rows if (row["kind"], row["processes"]) == (kind, num)] for num in (0, 1)]
        lines.append((kind, *(f"{median(its):.3f} ({max(its):.3f})" for its in taken)))
    print(markdown_table(("first batch of 64 lanes, s (longest)", "read by the rank", "by a process"), lines))
    return rows


def _jsonl(room: Path) -> Path:
    (folder := room / "waiting").mkdir()
    for number, shard in enumerate(samples.dealt(4_000, _WAITING_BYTES)):
        samples.write_jsonl(folder / f"{number:03}.jsonl", shard)
    return folder


def _tokenizer(name: str) -> Any:
    return load_tokenizer(DataConfig(tokenizer=name), vocab=1 << 31)
