"""Jobs that are killed while they save: the next one goes on from a complete checkpoint and clears up."""

import random
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, launch

import ckpt

JOB = """
import os, signal, sys, threading
import numpy as np
import ckpt, collectives

folder, victims, delay_s, steps = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
comm = collectives.world()
rows, count = 5000, 20

def state():
    shape = (rows * comm.size, 8)
    shards = {f"w{i}": ckpt.Shard(np.zeros((rows, 8)), shape, (rows * comm.rank, 0)) for i in range(count)}
    return shards | {"step": np.array(0)}

tensors = state()
newest = comm.broadcast_object(ckpt.latest(folder) if comm.rank == 0 else None)
step = 0
if newest is not None:
    step = ckpt.load(newest, tensors, comm=comm)["step"]
    assert int(tensors["step"]) == step
    assert all((tensors[f"w{i}"].data == step).all() for i in range(count)), "two steps are mixed"
if comm.rank == 0:
    print("from", step, flush=True)
comm.barrier()
if str(comm.rank) in victims:
    threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
for step in range(step + 1, step + 1 + steps):
    for i in range(count):
        tensors[f"w{i}"].data[:] = step
    tensors["step"][...] = step
    ckpt.save(f"{folder}/step-{step:08d}", tensors, comm=comm, meta={"step": step}, keep=2)
    if comm.rank == 0:
        print("saved", step, flush=True)
"""


def saved(stdout: str) -> int:
    """The last step a job said it had saved, or the one it began from."""
    return max(int(line.split()[1]) for line in stdout.splitlines() if line.split()[0] in ("from", "saved"))


@pytest.mark.parametrize("victims", ["0", "1", "01"])
def test_a_killed_job_loses_at_most_the_checkpoint_it_was_writing(tmp_path: Path, victims: str) -> None:
    rng = random.Random(int(victims))
    script = tmp_path / "job.py"
    script.write_text(JOB)
    folder = tmp_path / "checkpoints"
    env = {"PYTHONPATH": str(ROOT)}
    last = 0
    for _ in range(2):
        delay_s = rng.uniform(0.05, 0.4)
        result = launch(2, str(script), str(folder), victims, str(delay_s), "100000", env=env, timeout_s=60)
        assert result.returncode != 0, str(result)
        assert "two steps are mixed" not in result.stderr, str(result)
        assert f"from {last}\n" in result.stdout, str(result)
        newest = ckpt.latest(folder)
        assert newest is not None or saved(result.stdout) == 0, str(result)
        if newest is not None:
            last = ckpt.open(newest).meta["step"]
            # the line about the last one may not have made it to the terminal
            assert last in (saved(result.stdout), saved(result.stdout) + 1), str(result)
            assert (ckpt.open(newest)["w3"].read() == np.float64(last)).all()
    result = launch(2, str(script), str(folder), "", "0", "3", env=env, timeout_s=60)
    assert result.returncode == 0 and saved(result.stdout) == last + 3, str(result)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", f"step-{last + 2:08d}", f"step-{last + 3:08d}"]
