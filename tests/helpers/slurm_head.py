"""A job of Slurm that loses a node, or that is cancelled: a program for the head of mpirun/cluster (slurm_cluster.py).

    mpirun/cluster run -H 2x1 --on-head -- python slurm_head.py EVENT SLURM_ROOT FOLDER RUN BATCH_SCRIPT [ARGUMENTS ...]

Submits the script to all hosts. EVENT "loss" ends the last host after step 25 of the run in RUN, "scancel" cancels the job after step
5. Prints the job's output and state; the exit code is 0 if the job's is, or if it was cancelled as asked.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slurm_cluster import Slurm

from mpitrain.job.record.files import marks


def main(event: str, root: Path, folder: Path, run: Path, script: Path, arguments: list[str]) -> int:
    slurm, out = Slurm(root, folder, kill_wait_s=2 if event == "loss" else 30), folder / "job.out"
    options = [
        f"--nodes={len(slurm.hosts)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--no-kill",
        "--open-mode=append",
    ]
    job = slurm.submit(*options, f"--output={out}", script, *arguments)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if event == "loss":
            alive = marks.read_alive(run)
            if alive is not None and alive.step >= 25:
                os.kill(int((Path(os.environ["CLUSTER_ROOM"]) / slurm.hosts[-1]).read_text()), signal.SIGKILL)
                print("lost", slurm.hosts[-1], flush=True)
                break
        elif out.exists() and "\nstep 5/" in out.read_text():
            slurm.tell("scancel", job)
            break
        time.sleep(0.05)
    # A job stays COMPLETING until Slurm has given up the lost node.
    state = slurm.await_state(job, r"^(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT).*")
    if event == "scancel":
        slurm.await_nodes("idle", len(slurm.hosts), 30)  # once the ranks have saved
    print(out.read_text())
    print(subprocess.run(["sinfo", "--noheader", "--format=%N %T"], capture_output=True, text=True, timeout=20).stdout)
    print("state", state)
    return (
        0
        if state.startswith("CANCELLED") == (event == "scancel") and (event == "scancel" or state.endswith(" 0:0"))
        else 1
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], *(Path(word) for word in sys.argv[2:6]), sys.argv[6:]))
