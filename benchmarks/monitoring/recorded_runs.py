"""Runs that never ran: folders with the files of a run, in their exact formats, for benchmarks and tests of what reads them.

The same arguments give the same bytes. As in a real run, each rank's step takes as long as the slowest rank's, because all wait for it.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mpitrain.job.record.files.ranks import SUMMARY_FROM
from mpitrain.job.record.stragglers import CAUSES

BEGAN = 1_764_120_000.0  # unix seconds
STEP_S = 0.2
LAYERS = ("embedding", "blocks.0", "blocks.1", "head")


class Slow(NamedTuple):
    """A rank that is slow from `first` to `last`, with the straggler event that train writes for it."""

    rank: int
    cause: str  # "data", "cpu", "blocked" or "compute"
    first: int
    last: int
    factor: float = 1.4


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    ranks: int = 2,
    seed: int = 0,
    slow: Slow | None = None,
    lost_after: int | None = None,
    skipped: Sequence[int] = (),
    spikes: Sequence[int] = (),
    data_share: float = 0.01,
    sources: Sequence[str] = (),
    layers_every: int = 0,
    save_every: int = 0,
    evaluate_every: int = 0,
    gpu: bool = False,
    throttled: Sequence[int] = (),
    figures: Mapping[str, float] = {},
    events: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Mapping[str, Any]] = {},
    is_old: bool = False,
    torn: bool = False,
) -> Path:
    """Write the files of a run into `folder`, which is made.

    `lost_after`: the step, a multiple of 100, after which the last rank is lost, and the others go on. `skipped`: steps with a loss
    and a gradient that are not finite. `spikes`: steps with twice the loss, and an event. `data_share`: share of a step that waits
    for data. `throttled`: ranks whose GPU is throttled in the last third. `figures`: what a user logs, with noise. `events`: more
    events, each with its `step`. `is_old`: without the files and keys of monitoring. `torn`: the last lines are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    hosts = [f"node{rank // 8}" for rank in range(ranks)]
    times, all_events = [], []
    text: dict[str, list[bytes]] = {"metrics.jsonl": [], "ranks.jsonl": []}
    time = BEGAN
    sampled = -10.0
    for first in range(1, steps + 1, 100):
        numbers = np.arange(first, min(first + 100, steps + 1))
        present = ranks if lost_after is None or first <= lost_after else ranks - 1
        seconds = _seconds_of_ranks(random, numbers, present, data_share, slow if present == ranks else None)
        loss = 2.0 + 4.0 * np.exp(-numbers / (steps / 6 + 1)) + random.normal(0, 0.03, len(numbers))
        norms = np.exp(random.normal(-0.5, 0.4, len(numbers)))
        for at, step in enumerate(numbers.tolist()):
            mine = {name: round(float(values[at, 0]), 7) for name, values in seconds.items() if name.endswith("_s")}
            time += mine["step_s"] + 0.0005
            times.append(time)
            is_skipped = step in skipped
            value = float(loss[at]) * (2.0 if step in spikes else 1.0)
            line: dict[str, Any] = {
                "step": step,
                "loss": None if is_skipped else value,
                "lr": 3e-3 * min(1.0, step / 50),
                "grad_norm": None if is_skipped else float(norms[at]) * (8.0 if step in spikes else 1.0),
                "tokens_per_s": 2048 * ranks / mine["step_s"],
                "step_s": mine["step_s"],
                "comm_s": mine["comm_s"],
                "data_s": mine["data_s"],
                "memory_bytes": int(seconds["memory_bytes"][at, 0]),
                "mfu": 0.41 * STEP_S / mine["step_s"],
                "check_s": mine["check_s"],
            }
            if is_skipped:
                line["skipped"] = True
            if not is_old:
                line["time"] = round(time, 3)
                line |= {name: mine[name] for name in ("forward_s", "backward_s", "optimizer_s", "comm_hidden_s")}
                line |= {"mfu_vendor": 0.3 * STEP_S / mine["step_s"]} if gpu else {}
                line |= {f"loss/{name}": value + 0.1 * i for i, name in enumerate(sources) if not is_skipped}
                line |= {name: scale * float(1 + 0.1 * random.standard_normal()) for name, scale in figures.items()}
                if layers_every and step % layers_every == 0:
                    line |= _figures_of_layers(random, step)
                text["ranks.jsonl"].append(
                    msgspec.json.encode(
                        _line_of_ranks(random, seconds, at, step, time - sampled > 5, gpu, throttled, steps)
                    )
                )
                if time - sampled > 5:
                    sampled = time
            text["metrics.jsonl"].append(msgspec.json.encode(line))
            if evaluate_every and step % evaluate_every == 0:
                found = {
                    "step": step,
                    "heldout_loss": float(loss[at]) + 0.05,
                    "heldout_bits_per_byte": float(loss[at]) / 0.6931,
                }
                text["metrics.jsonl"].append(msgspec.json.encode(found if is_old else {"time": round(time, 3)} | found))
            if save_every and step % save_every == 0:
                (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
                all_events.append(
                    {"event": "save", "step": step, "path": f"checkpoints/step-{step:08d}", "cost_s": 0.021}
                )
            if is_skipped:
                all_events.append({"event": "skip", "step": step, "loss": None, "grad_norm": None, "loss_scale": None})
            if step in spikes:
                what = {"loss": {"what": "loss", "value": value, "median": value / 2, "score": 9.0}}
                all_events.append({"event": "spike", "step": step, "what": what, "skipped": False})
            if slow is not None and step == min(slow.last, slow.first + 25):
                said = f"{CAUSES[slow.cause]} (36 ms of a step more than the other ranks)"
                all_events.append(
                    {"event": "straggler", "rank": slow.rank, "host": hosts[slow.rank], "step": step, "factor": slow.factor,
                     "cost_s": 5.3, "cause": slow.cause, "words": said}
                )  # fmt: skip
    for name, lines in text.items():
        if lines:
            (folder / name).write_bytes(b"\n".join(lines) + (b'\n{"step": 99999, "lo' if torn else b"\n"))
    begins = [_begin(0, "its beginning", hosts, gpu)]
    if lost_after is not None:
        begins += [{"event": "shrink", "step": lost_after, "ranks": ranks - 1, "cost_s": 1.5}]
        begins += [_begin(lost_after, "the copies in memory", hosts[:-1], gpu)]
    end = {"event": "end", "step": steps, "reason": "finished"}
    listed = [*([] if is_old else begins), *all_events, *events, *([] if is_old or torn or not steps else [end])]
    with (folder / "events.jsonl").open("w") as file:
        for event in sorted(listed, key=lambda event: event.get("step") or 0):
            step = min(event.get("step") or 0, steps)
            moment = datetime.datetime.fromtimestamp(times[step - 1] if step > 0 else BEGAN, datetime.UTC)
            stamp = {
                "time": moment.isoformat(timespec="milliseconds"),
                "event": event["event"],
                "rank": None,
                "host": None,
                "cost_s": None,
            }
            file.write(json.dumps(stamp | dict(event)) + "\n")
    _write_settings(folder / "config.toml", steps, settings)
    return folder


def _begin(step: int, source: str, hosts: Sequence[str], gpu: bool) -> dict[str, Any]:
    """The event."""
    ranks = len(hosts)
    return {
        "event": "begin", "step": step, "ranks": ranks, "hosts": hosts, "device": "NVIDIA H100" if gpu else "cpu", "threads": 1,
        "environment": {"cpu": "a processor", "instructions": "AVX2", "torch": "2.9.0", "numpy": "2.3.0", "mpi": "Open MPI v5.0.0"},
        "layout": {"dp_shard": ranks}, "work": [0] * ranks, "source": source, "flops_per_s": 1e11 * ranks,
        "vendor_flops_per_s": 9.89e14 * ranks if gpu else None, "memory_bytes_of_rank": 80_000_000_000 if gpu else 16_000_000_000,
        "parameters": 124_000_000, "tokens_per_step": 2048 * ranks,
    }  # fmt: skip


def _seconds_of_ranks(
    random: np.random.Generator, numbers: np.ndarray, ranks: int, data_share: float, slow: Slow | None
) -> dict[str, np.ndarray]:
    """Of each name of ranks.jsonl, (steps, ranks)."""
    shape = len(numbers), ranks

    def about(seconds: float) -> np.ndarray:
        return seconds * np.exp(random.normal(0, 0.03, shape))

    found = {
        "data_s": about(data_share * STEP_S), "forward_s": about(0.26 * STEP_S), "backward_s": about(0.52 * STEP_S),
        "optimizer_s": about(0.05 * STEP_S), "check_s": about(0.002 * STEP_S), "delay_s": about(0.0002),
    }  # fmt: skip
    cpu_s = found["forward_s"] + found["backward_s"] + found["optimizer_s"]
    if slow is not None:
        lost = (slow.factor - 1) * 0.85 * STEP_S * ((numbers >= slow.first) & (numbers <= slow.last))
        found["data_s" if slow.cause == "data" else "backward_s"][:, slow.rank] += lost
        if slow.cause == "cpu":
            found["delay_s"][:, slow.rank] += lost
        if slow.cause == "compute":
            cpu_s[:, slow.rank] += lost
    busy = np.sum([found[name] for name in ("data_s", "forward_s", "backward_s", "optimizer_s")], 0)
    comm = 0.06 * STEP_S + busy.max(axis=1, keepdims=True) - busy
    hiccup = (random.random(len(numbers)) < 0.002)[:, None] * 2.5 * STEP_S  # all ranks stand still
    step_s = busy + comm + found["check_s"] + 0.01 * STEP_S + hiccup
    memory = np.broadcast_to(812e6 + 1e6 * np.arange(ranks), shape)
    return {
        "step_s": step_s, **found, "comm_s": comm, "comm_hidden_s": about(0.1 * STEP_S), "cpu_s": cpu_s,
        "rows": np.full(shape, 6.0), "memory_bytes": memory,
    }  # fmt: skip


def _line_of_ranks(
    random: np.random.Generator,
    seconds: dict[str, np.ndarray],
    at: int,
    step: int,
    is_sampled: bool,
    gpu: bool,
    throttled: Sequence[int],
    steps: int,
) -> dict[str, Any]:
    """A line of ranks.jsonl."""
    rows = {name: values[at] for name, values in seconds.items()}
    num_ranks = len(rows["step_s"])
    listed = {
        name: np.round(row, 5).tolist() if name.endswith("_s") else row.astype(int).tolist()
        for name, row in rows.items()
    }
    line: dict[str, Any] = {"step": step}
    if num_ranks >= SUMMARY_FROM:
        line["num_ranks"] = num_ranks
        line["summary"] = {
            name: [min(row), round(float(np.median(row)), 5), max(row), int(np.argmax(row))]
            for name, row in listed.items()
        }
        if step % 100:
            return line
        is_sampled = True
    line["ranks"] = listed
    if not is_sampled:
        return line

    def each(value: float, noise: float = 0.02) -> list[float]:
        return np.round(value * (1 + noise * random.standard_normal(num_ranks)), 1).tolist()

    parts = {"parameters": 0.25, "gradients": 0.25, "optimizer": 0.3, "shared": 0.05, "other": 0.15}
    gauges: dict[str, Any] = {
        f"memory/{name}_bytes": (share * rows["memory_bytes"]).astype(int).tolist() for name, share in parts.items()
    }
    gauges |= {"cpu_percent": each(97), "net_sent_bytes_per_s": each(4e7), "net_received_bytes_per_s": each(4e7)}
    if gpu:
        is_throttled = [int(rank in throttled and step > 2 * steps / 3) for rank in range(num_ranks)]
        gauges |= {
            "gpu_percent": each(96),
            "gpu_watts": each(640),
            "gpu_celsius": each(66),
            "gpu_throttled": is_throttled,
        }
    else:
        gauges |= dict.fromkeys(("gpu_percent", "gpu_watts", "gpu_celsius", "gpu_throttled"), [None] * num_ranks)
    line["gauges"] = gauges
    return line


def _figures_of_layers(random: np.random.Generator, step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for at, layer in enumerate(LAYERS):
        norm = float(np.exp(random.normal(-1 - 0.2 * at, 0.2)))
        found |= {
            f"grad_norm/{layer}": norm, f"param_norm/{layer}": 20 + 5 * at + step**0.5, f"update_ratio/{layer}": norm / 400,
            f"zeros/{layer}": 0.001 * (at + 1),
        }  # fmt: skip
    return found | {"logit_entropy": 5.4 * float(np.exp(-step / 2000))}


def _write_settings(path: Path, steps: int, settings: Mapping[str, Mapping[str, Any]]) -> None:
    document: dict[str, dict[str, Any]] = {
        "model": {"family": "gpt", "size": "small"},
        "optim": {"lr": 0.003, "clip_norm": 1.0, "warmup_steps": 50},
        "train": {"steps": steps, "batch": 12},
    }
    for section, values in settings.items():
        document.setdefault(section, {}).update(values)
    lines = ['run = "runs/made"', 'resume = "auto"']
    for section, values in document.items():
        lines += ["", f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    path.write_text("\n".join(lines) + "\n")
