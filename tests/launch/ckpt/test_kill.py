"""Jobs that are killed while they save: the next one goes on from a complete checkpoint and clears up.

It kills 200 times in a full run (`./mpirun/test full launch`), else a few times.
"""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from extent import extent
from launching import ROOT, Result, launch

import ckpt

KILLS = extent(8, 200)
WAYS = {
    "a file a rank": {},
    "one file": {"files": "one"},
    "background": {"background": True},
    "background, one file": {"background": True, "files": "one"},
}

JOB = """
import json, os, signal, sys, threading
import numpy as np
import ckpt, collectives

folder, victims, delay_s, steps, options = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
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
    ckpt.save(f"{folder}/step-{step:08d}", tensors, comm=comm, meta={"step": step}, keep=2, **options)
    if comm.rank == 0:
        # In the background that one is on its way, and the one before has ended.
        print("saved", step - bool(options.get("background")), flush=True)
ckpt.wait()
if comm.rank == 0:
    print("saved", step, flush=True)
"""


def saved(stdout: str) -> int:
    """The last step a job said it had saved, or the one it began from. Lines may be empty, or of mpirun's."""
    return max(int(step) for step in re.findall(r"^(?:from|saved) (\d+)\r?$", stdout, re.MULTILINE))


@pytest.mark.rest
@pytest.mark.timeout_s(60 + 10 * KILLS)
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_job_loses_at_most_the_checkpoint_it_was_writing(tmp_path: Path, way: str) -> None:
    rng = random.Random(way)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    folder = tmp_path / "checkpoints"
    last = 0

    def job(victims: str, delay_s: float, steps: int) -> Result:
        words = (str(folder), victims, str(delay_s), str(steps), json.dumps(WAYS[way]))
        return launch(2, str(script), *words, env={"PYTHONPATH": str(ROOT)}, timeout_s=60)

    for _ in range(-(-KILLS // len(WAYS))):
        result = job(rng.choice(["0", "1", "01"]), rng.uniform(0.02, 0.4), 100000)
        assert result.returncode != 0, str(result)
        assert "two steps are mixed" not in result.stderr, str(result)
        assert f"from {last}\n" in result.stdout, str(result)
        newest = ckpt.latest(folder)
        assert newest is not None or saved(result.stdout) == 0, str(result)
        if newest is not None:
            last = ckpt.open(newest).meta["step"]
            # the line about the last one may not have made it to the terminal
            assert 0 <= last - saved(result.stdout) <= (2 if "background" in way else 1), str(result)
            assert (ckpt.open(newest)["w3"].read() == np.float64(last)).all()
            assert ckpt.verify(newest) == []
    result = job("", 0, 3)
    assert result.returncode == 0 and saved(result.stdout) == last + 3, str(result)
    # A folder whose job was killed before it signed it may be a living job's for a minute: it is empty, and a later save removes it.
    names = sorted(p.name for p in folder.iterdir() if not (p.name.endswith(".staging") and not any(p.iterdir())))
    assert names == ["latest", f"step-{last + 2:08d}", f"step-{last + 3:08d}"]
