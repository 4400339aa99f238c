"""Slurm on the hosts of mpirun/cluster: a program for its head.

    mpirun/cluster run -H 2x1 --on-head -- python slurm_head.py SLURM_ROOT FOLDER RUN BATCH_SCRIPT

Starts slurmctld on head, and slurmd on each host; submits the script to all hosts, and ends the last host after step 25 of the run in
RUN. Prints the job's output and state; the exit code is 0 if the job's is.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpitrain.elastic import marks

CONF = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/dev/shm/munge.socket
PluginDir={plugins}
StateSaveLocation=/dev/shm/slurm-state
SlurmdSpoolDir=/dev/shm/slurm-spool
SlurmctldPidFile=/dev/shm/slurmctld.pid
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=5
KillWait=2
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def main(root: Path, folder: Path, run: Path, script: Path) -> int:
    hosts = [word.partition(":")[0] for word in os.environ["CLUSTER_HOSTS"].split(",")]
    libraries = root / "usr/lib/x86_64-linux-gnu"
    nodes = "\n".join(f"NodeName={host} CPUs=2 State=UNKNOWN" for host in hosts)
    (folder / "slurm.conf").write_text(CONF.format(plugins=libraries / "slurm-wlm", folder=folder, nodes=nodes))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["LD_LIBRARY_PATH"] = f"{libraries}:{libraries / 'slurm-wlm'}"
    os.environ["PATH"] = f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}"
    munge = f"munged --force --socket=/dev/shm/munge.socket --key-file={folder}/key --log-file=/dev/shm/munged.log"
    munge += " --pid-file=/dev/shm/munged.pid --seed-file=/dev/shm/munged.seed >/dev/null 2>&1"
    subprocess.run(["sh", "-c", f"mkdir /dev/shm/slurm-state && {munge}"], check=True, timeout=20)
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["slurmctld", "-c", "-D"], **quiet)  # type: ignore[call-overload]
    for host in hosts:
        start = f"mkdir /dev/shm/slurm-spool && {munge} && exec slurmd -D -N {host} -d {root}/usr/sbin/slurmstepd"
        subprocess.Popen([os.environ["CLUSTER_SSH"], host, start], **quiet)  # type: ignore[call-overload]
    wait_for("idle", ["sinfo", "--noheader", "--format=%T %D"], rf"^idle {len(hosts)}$")
    out = folder / "job.out"
    words = [
        "sbatch",
        "--parsable",
        f"--nodes={len(hosts)}",
        "--ntasks-per-node=1",
        "--no-kill",
        f"--output={out}",
        script,
    ]
    job = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    show = ["scontrol", "--oneliner", "show", "job", job]
    until = time.monotonic() + 60
    while time.monotonic() < until:
        alive = marks.read_alive(run)
        if alive is not None and alive.step >= 25:
            os.kill(int((Path(os.environ["CLUSTER_ROOM"]) / hosts[-1]).read_text()), signal.SIGKILL)
            print("lost", hosts[-1], flush=True)
            break
        time.sleep(0.05)
    # A job stays COMPLETING until Slurm has given up the lost node.
    state = wait_for("the job's end", show, r"JobState=(COMPLET|FAILED|CANCELLED|NODE_FAIL|TIMEOUT).* ExitCode=\S+")
    print(out.read_text())
    print(subprocess.run(["sinfo", "--noheader", "--format=%N %T"], capture_output=True, text=True, timeout=20).stdout)
    print(state)
    return 0 if state.startswith("JobState=COMPLET") and state.endswith("ExitCode=0:0") else 1


def wait_for(what: str, command: list[str], pattern: str) -> str:
    answer = ""
    for _ in range(600):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        if (match := re.search(pattern, answer, re.MULTILINE)) is not None:
            return match[0]
        time.sleep(0.1)
    raise SystemExit(f"{what} did not come: {answer}")


if __name__ == "__main__":
    raise SystemExit(main(*(Path(word) for word in sys.argv[1:5])))
