"""The main job on shards in a real S3 server: the losses of local files, one request per shard, and the death of the server."""

import hashlib
import json
import threading
import time
from pathlib import Path

import pytest
from launching import Result, launch
from main_job import metrics
from s3_server import s3_server

pytestmark = pytest.mark.rest

zstandard = pytest.importorskip("zstandard")

NUM_SHARDS, DOWN_S = 48, 5.0
SETTINGS = [
    "--model.width", "32", "--model.layers", "1", "--model.heads", "2", "--model.context", "32", "--train.batch", "6",
    "--train.steps", "32", "--train.sample-bytes", "0", "--train.eval-batches", "0", "--log.every", "1",
]  # fmt: skip


def train(run: Path, shards: str, **options: object) -> Result:
    words = ["-m", "mpitrain", "--run", str(run), "--data.path", shards, "--data.cache", f"{run}-cache", *SETTINGS]
    result = launch(2, *words, timeout_s=90, **options)
    assert result.returncode == 0, str(result)
    return result


def outcome(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in metrics(run) if "loss" in line]


@pytest.mark.timeout_s(300)
def test_a_job_on_s3_and_the_death_of_the_server(tmp_path: Path) -> None:
    folder, hashes = tmp_path / "shards", []
    folder.mkdir()
    for number in range(NUM_SHARDS):
        lines = [json.dumps({"text": f"all work makes document {n} of {number} dull. "}) for n in range(4)]
        packed = zstandard.compress("\n".join(lines).encode())
        (folder / f"{number:03}.jsonl.zst").write_bytes(packed)
        hashes.append(f"{hashlib.sha256(packed).hexdigest()}  {number:03}.jsonl.zst\n")
    train(tmp_path / "local", f"{folder}/*.jsonl.zst")
    with s3_server(tmp_path / "s3") as server:
        for file in folder.iterdir():
            server.put(f"shards/{file.name}", file.read_bytes())
        server.put("shards/all.sha256", "".join(hashes).encode())
        train(tmp_path / "remote", "s3://bucket/shards/*.jsonl.zst", env=server.environment)
        fetched = [key for key in server.gets() if key.startswith("shards/")]
        assert len(fetched) > 20 and len(fetched) == len(set(fetched)), sorted(fetched)

        server.requests.clear()
        begin, num_before = threading.Event(), len(fetched) // 3

        def kill_once(method: str, path: str) -> None:
            if len(server.gets()) >= num_before and not begin.is_set():
                begin.set()
                server.kill()

        def restart() -> None:
            if begin.wait(60.0):
                time.sleep(DOWN_S - 2.0)  # the start takes 2 s at least
                server.start()

        server.meddle = kill_once
        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            result = train(tmp_path / "killed", "s3://bucket/shards/all.sha256", env=server.environment)
        finally:
            begin.set()
            restarting.join()
        again = [key for key in server.gets() if key.startswith("shards/") and key.endswith(".zst")]
        assert len(set(again)) > num_before and len(again) > len(set(again)), str(result)
    assert outcome(tmp_path / "local") == outcome(tmp_path / "remote") == outcome(tmp_path / "killed")
    assert len(outcome(tmp_path / "local")) == 32
