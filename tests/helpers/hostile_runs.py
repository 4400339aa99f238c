"""Folders of runs as a stranger would make them to harm their readers."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"
FILES = ("metrics.jsonl", "ranks.jsonl", "events.jsonl", "config.toml", "failure.txt", "profile.json")
STEPS = "".join(
    json.dumps(
        {"step": step, "time": 1.7e9 + step, "loss": 3.0 / step, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 9.0, "step_s": 0.1,
         "forward_s": 0.04, "backward_s": 0.05, "comm_s": 0.01}
    )
    + "\n"
    for step in range(1, 9)
)  # fmt: skip
BEGIN = {
    "time": "2026-11-27T10:00:00.000+00:00", "event": "begin", "rank": None, "host": None, "cost_s": None, "step": 0,
    "source": "its beginning", "ranks": 2, "hosts": ["h1", "h2"], "device": "cpu", "threads": 1, "environment": {"cpu": "x"},
    "layout": {"dp_shard": 2}, "flops_per_s": 1e12, "memory_bytes_of_rank": 10**9,
}  # fmt: skip
SETTINGS = '[model]\nsize = "tiny"\n\n[train]\nsteps = 20\n'


def usual(folder: Path) -> None:
    """A small run, of which a case harms a part."""
    (folder / "traces").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_text(STEPS)
    (folder / "ranks.jsonl").write_text(
        '{"step": 8, "ranks": {"step_s": [0.1, 0.1], "comm_s": [0.0, 0.1], "forward_s": [0.1, 0.0]}}\n'
    )
    (folder / "events.jsonl").write_text(json.dumps(BEGIN) + "\n")
    (folder / "config.toml").write_text(SETTINGS)


def trace_of(folder: Path) -> Path:
    """The place of a trace."""
    return folder / "traces" / "step-00000001.json.gz"


def all_files(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Each file of a run, and a trace, are what `make` makes."""

    def harm(folder: Path) -> None:
        for path in (
            *(folder / name for name in FILES),
            folder / ".lock",
            folder / ".done",
            folder / ".trace",
            trace_of(folder),
        ):
            path.unlink(missing_ok=True)
            make(path)

    return harm


def _one_file(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return harm


def _sparse(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text, errors="surrogatepass") and None


def _deep_json(folder: Path) -> None:
    deep = "[" * 200_000
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        (folder / name).write_text(
            f'{{"step": 1, "loss": {deep}\n{deep}\n{{"step": 1, "ranks": {{"step_s": {deep}}}}}\n'
        )
    for name in ("profile.json", ".lock", ".done", ".trace", ".lease", ".alive"):
        (folder / name).write_text('{"parts": ' + deep + "]" * 200_000 + "}")


def _escapes(folder: Path) -> None:
    bad = {name: [ESCAPES] if isinstance(its, list) else ESCAPES for name, its in BEGIN.items()}
    odd = BEGIN | {"event": "straggler" + ESCAPES, "rank": 0, "host": "h" + ESCAPES, "step": 5, "words": "w" + ESCAPES}
    new = {"event": ESCAPES, ESCAPES: ESCAPES, "step": 3, "time": "2026-11-27T10:00:00.000+00:00"}
    begin = BEGIN | {"source": ESCAPES, "hosts": [ESCAPES, "h2"], "device": ESCAPES, "layout": {ESCAPES: 2},
                     "environment": {ESCAPES: ESCAPES}}  # fmt: skip
    failure = odd | {"event": "failure", "problem": f"boom\n{ESCAPES}"}
    lines = [json.dumps(each) + "\n" for each in (bad, odd, begin, new, failure)]
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "metrics.jsonl").write_text(
        STEPS + json.dumps({"step": 9, "loss": 1.0, ESCAPES: 2.0, f"loss/{ESCAPES}": 1}) + "\n"
    )
    (folder / "failure.txt").write_text(f"2026\nboom {ESCAPES}\n")
    (folder / "config.toml").write_text(f"[train]\nsteps = 20\n{json.dumps(ESCAPES)} = {json.dumps(ESCAPES)}\n")
    lock = {"host": ESCAPES, "pid": 1, "start": None, "token": "x", "job": ESCAPES, "place": ""}
    (folder / ".lock").write_text(json.dumps(lock))


def _lines_of_trace(folder: Path, *lines: str) -> None:
    head = '{"displayTimeUnit":"ms","otherData":{},"traceEvents":[\n'
    with gzip.open(trace_of(folder), "wt") as file:
        file.write(head + ",\n".join(lines) + "\n]}\n")


def _bars(num: int, row: str, name: str, category: str) -> list[str]:
    """Events of one rank."""
    place = {"pid": 1, "tid": 1}
    events = [
        {"ph": "M", "name": "process_name", **place, "args": {"name": "x"}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": row}},
        *({"ph": "X", "name": name, "cat": category, **place, "ts": n * 1000, "dur": 1} for n in range(num)),
    ]
    return [json.dumps(event) for event in events]


def _bomb(folder: Path) -> None:
    with gzip.open(trace_of(folder), "wb", compresslevel=9) as file:
        line = b'{"ph":"X","name":"forward x","pid":1000,"tid":0,"ts":1,"dur":1,"cat":"layer"},\n' * 20_000
        file.write(b'{"displayTimeUnit":"ms","otherData":{},"traceEvents":[\n')
        for _ in range(40):
            file.write(line)
    for name in FILES[:3]:  # a file of lines is not packed
        (folder / name).write_bytes(gzip.compress(b"\0" * (1 << 20)))


def _long_words(folder: Path) -> None:
    """Texts on which a pattern could take hours."""
    texts = ["a" * 200_000 + " x://", "://" * 80_000, ":" * 200_000 + "x://?", "x://h?" + "&;" * 100_000, "x://" + "a@" * 100_000,
             "a-" * 100_000, "`" * 200_000, "\x1b" * 30_000, "-" * 100_000, "--a." * 25_000, "-" * 500_000]  # fmt: skip
    events = [
        BEGIN | {"event": "straggler", "rank": number, "step": 5, "words": text[:100_000]}
        for number, text in enumerate(texts)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "failure.txt").write_text("2026\n" + "x-y://@?#" * 100_000)
    names = dict.fromkeys(texts, 1.0)
    (folder / "metrics.jsonl").write_text(STEPS + json.dumps({"step": 9, "loss": 1.0} | names) + "\n")


def _wide(folder: Path) -> None:
    """Lines with other names each, and one line of many ranks among many of one."""
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "a{n}": 1}}\n' for n in range(60_000)))
    many = json.dumps([0.5] * 40_000)
    (folder / "ranks.jsonl").write_text(
        f'{{"step": 1, "ranks": {{"step_s": {many}}}}}\n'
        + "".join(f'{{"step": {n}, "ranks": {{"step_s": [1]}}}}\n' for n in range(2, 60_000))
    )


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 400)


def _big(number: str) -> Callable[[Path], None]:
    line = f'{{"step": {number}, "time": {number}, "loss": {number}, "tokens_per_s": {number}, "step_s": {number}}}\n'
    event = f'{{"event": "begin", "step": {number}, "rank": {number}, "ranks": {number}, "cost_s": {number}, "hosts": {number}}}\n'
    ranks = f'{{"step": {number}, "num_ranks": {number}, "ranks": {{"step_s": [{number}]}}}}\n'

    def harm(folder: Path) -> None:
        (folder / "metrics.jsonl").write_text(STEPS + line)
        (folder / "events.jsonl").write_text(event)
        (folder / "ranks.jsonl").write_text(ranks)
        (folder / "config.toml").write_text(
            f"[train]\nsteps = {number}\nbatch = {number}\n[model]\nlayers = {number}\n"
        )
        for name in (".lock", ".done", ".trace", ".lease", ".alive", ".launch"):
            (folder / name).write_text(
                f'{{"launch": {number}, "step": {number}, "pid": {number}, "time": {number}, "steps": {number}, "number": {number}, '
                f'"run": "x", "host": "h", "start": null, "token": "t", "reason": "finished", "id": "i", "timeout_s": {number}, '
                '"state": "done"}'
            )

    return harm


HARMS: dict[str, Callable[[Path], None]] = {
    "pipe": all_files(os.mkfifo),
    "link to a device": all_files(lambda path: path.symlink_to("/dev/zero")),
    "link to a file": all_files(lambda path: path.symlink_to("/etc/passwd")),
    "folder": all_files(Path.mkdir),
    "sparse file of 1 TB": all_files(_sparse(10**12)),
    "sparse lines of 4 GB": all_files(_sparse(4 << 30)),
    **{f"pipe {name}": _one_file(name, os.mkfifo) for name in FILES},
    "gzip bomb": _bomb,
    "gzip bomb of zeros": lambda folder: trace_of(folder).write_bytes(gzip.compress(bytes(150 << 20), 1)) and None,
    "deep JSON": _deep_json,
    "deep TOML": _text("config.toml", "a = " + "[" * 200_000),
    "deep tables of TOML": _text("config.toml", "[" + ".".join("a" * 100_000) + "]\n"),
    "deep names of TOML": _text("config.toml", ".".join(['"a"'] * 100_000) + " = 1\n"),
    "deep inline tables of TOML": _text("config.toml", "x = " + "{a = " * 50_000),
    "step 10**30": _big("1" + "0" * 30),
    "number of 5,000 digits": _big("9" * 5000),
    "1e300": _big("1e300"),
    "1e999": _big("1e999"),
    "minus": _big("-5"),
    "NaN": _big("NaN"),
    "10**9 ranks": _text("ranks.jsonl", '{"step": 1, "num_ranks": 1000000000, "ranks": {"step_s": [1.0]}}\n'),
    "10**9 ranks in a summary": _text("ranks.jsonl", '{"step": 1, "num_ranks": 1000000000, "summary": {"step_s": [1, 1, 1, 1]}}\n'),
    "nested hosts": _text("events.jsonl", json.dumps(BEGIN | {"hosts": [["h"], {"h": 1}, None, 3]}) + "\n"),
    "a summary that is a number": _text("ranks.jsonl", '{"step": 1, "num_ranks": 70, "summary": 7}\n'),
    "summaries of other lengths": _text(
        "ranks.jsonl", '{"step": 1, "num_ranks": 70, "summary": {"step_s": [1], "comm_s": 3, "memory_bytes": [null, 1, 2, 3]}}\n'
    ),
    "ranks of other lengths": _text(
        "ranks.jsonl",
        '{"step": 1, "ranks": {"step_s": [1, 2, 3], "comm_s": [1], "forward_s": []}, '
        '"gauges": {"memory/a": [1], "memory/b": [1, 2]}}\n',
    ),
    "escapes": _escapes,
    "binary": all_files(_binary),
    "surrogates": _text("events.jsonl", '{"event": "\\ud800", "words": "\\udfff", "time": "\\ud800"}\n'),
    "wide": _wide,
    "long words": _long_words,
    "no time": _text("metrics.jsonl", '{"step": 1, "step_s": 0, "forward_s": 0}\n'),
    "steps back": _text("metrics.jsonl", "".join(reversed(STEPS.splitlines(keepends=True)))),
    "one step of all": _text("metrics.jsonl", STEPS[: STEPS.index("\n") + 1]),
    "years": _text(
        "events.jsonl",
        '{"event": "begin", "time": "0001-01-01T00:00:00"}\n{"event": "x", "time": "9999-12-31T23:59:59+00:00"}\n',
    ),
    "markup": lambda folder: _lines_of_trace(
        folder,
        '{"name":"process_name","ph":"M","pid":1000,"args":{"name":"[/x] $a$ {b}"}}',
        '{"name":"step 1","ph":"X","cat":"step","pid":1000,"tid":1,"ts":1e14,"dur":1e14}',
    ),
    "an odd trace": lambda folder: _lines_of_trace(folder, "7", "null", "[]"),
    "a profile of no rank": _text("profile.json", '{"parts": {"layers": {}, "stages": [], "num_steps": 0}, "memory": []}'),
    "an odd profile": _text(
        "profile.json",
        '{"parts": {"layers": {"blocks.[/x]": {"forward": [1.0]}}, "stages": [0], "num_steps": 1}, "memory": '
        '[{"layers": {}, "others": {}, "peak": 1, "moment": "[/x]"}]}',
    ),
    "many settings": _text("config.toml", "".join(f"[a{number}]\nb = 1\n" for number in range(20_000))),
    "dashes": _text(
        "config.toml", "[data]\npath = [" + ", ".join([f'"{"-" * 99_999}"'] * 5 + [f'"{"--a." * 24_999}"']) + "]\n"
    ),
    "an address in an address": _text("config.toml", f'[data]\npath = ["{"x://u:p@" * 12_000}"]\n'),
    "many figures": _text("metrics.jsonl", json.dumps({"step": 1} | {f"a{number}": 1 for number in range(100_000)}) + "\n"),
    "many short events": _text("events.jsonl", '{"event": "x", "step": 1}\n' * 100_000),
    "many starts": _text(
        "events.jsonl", "".join(json.dumps(BEGIN | {"environment": {f"k{n}": "v"}}) + "\n" for n in range(8_000))
    ),
    "many facts": _text("events.jsonl", json.dumps(BEGIN | {"environment": {f"k{n}": "v" for n in range(50_000)}}) + "\n"),
    "many slow ranks": _text(
        "events.jsonl", "".join(json.dumps(BEGIN | {"event": "straggler", "rank": n, "factor": 2.0}) + "\n" for n in range(8_000))
    ),
    "many bars": lambda folder: _lines_of_trace(folder, *_bars(30_000, "layers", "forward x", "layer")),
    "many steps": lambda folder: _lines_of_trace(folder, *_bars(2_000, "steps", "s" * 100, "step")),
    "a command": _text("config.toml", '[log]\non_event = ": TOPSECRET"\n'),
}  # fmt: skip
READ_BY = {"many settings": ("diff", "report"), "many starts": ("diff", "report"), "many slow ranks": ("profile", "report"),
           "many short events": ("profile", "report")}  # fmt: skip
"""The commands that have most to do in a case: the others are left out, for time. Cases that are not here are read by all."""
