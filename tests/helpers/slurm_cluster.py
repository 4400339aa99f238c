"""Slurm on the hosts of mpirun/cluster, for programs on its head (`mpirun/cluster run -H 2x2 --on-head -- python PROGRAM ...`).

slurmctld runs on head, and slurmd on each host. So a batch script runs on the first host of its job, and its ranks on all.
There are three partitions: a job in "urgent" takes the hosts from jobs in "main" and "graced", which go back into the queue; those in
"graced" have 60 s from the announcement to the end.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_CONF = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/dev/shm/munge.socket,cred_expire=5
StateSaveLocation=/dev/shm/slurm-state
SlurmdSpoolDir=/dev/shm/slurm-spool
SlurmctldPidFile=/dev/shm/slurmctld.pid
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS=/dev/shm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=5
KillWait={kill_wait_s}
CompleteWait=0
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 MaxTime=INFINITE
PartitionName=graced Nodes=ALL State=UP PriorityTier=1 GraceTime=60 MaxTime=INFINITE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
"""


class Slurm:
    """A running Slurm. `root`: of `slurm_packages.slurm_root`. `folder`: for its settings and logs. It ends with the cluster."""

    def __init__(self, root: Path, folder: Path, *, cores: int = 4, kill_wait_s: int = 30) -> None:
        self.folder = folder
        self.hosts = [word.partition(":")[0] for word in os.environ["CLUSTER_HOSTS"].split(",")]
        nodes = "\n".join(f"NodeName={host} CPUs={cores} State=UNKNOWN" for host in self.hosts)
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes=nodes, kill_wait_s=kill_wait_s))
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        # Laid over /usr in the mount namespace of each host, so that Slurm finds its plugins and PMIx as where it is installed.
        mount = f"mount -t overlay slurm -o lowerdir={root}/usr:/usr /usr"
        munge = f"munged --force --socket=/dev/shm/munge.socket --key-file={folder}/key --log-file=/dev/shm/munged.log"
        munge += " --pid-file=/dev/shm/munged.pid --seed-file=/dev/shm/munged.seed >/dev/null 2>&1"
        subprocess.run(["sh", "-c", f"{mount} && mkdir /dev/shm/slurm-state && {munge}"], check=True, timeout=20)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["slurmctld", "-c", "-D"], **quiet)  # type: ignore[call-overload]
        for host in self.hosts:
            start = f"{mount} && mkdir /dev/shm/slurm-spool && {munge} && exec slurmd -D -N {host}"
            subprocess.Popen([os.environ["CLUSTER_SSH"], host, start], **quiet)  # type: ignore[call-overload]
        self.await_nodes("idle", len(self.hosts))

    def ask(self, *words: str | Path) -> str:
        """What a command of Slurm prints on stdout."""
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()

    def tell(self, *words: str | Path) -> None:
        """A command of Slurm that must succeed."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise SystemExit(f"{words}: {done.stdout}{done.stderr}")

    def submit(self, *words: str | Path) -> str:
        """sbatch with these words; the id of the job."""
        done = subprocess.run(["sbatch", "--parsable", *words], capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise SystemExit(f"sbatch {words}: {done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING, and its exit code."""
        text = self.ask("scontrol", "--oneliner", "show", "job", job)
        found = re.search(r"JobState=(\S+).* ExitCode=(\S+)", text)
        return f"{found[1]} {found[2]}" if found else text

    def await_state(self, job: str, pattern: str, timeout_s: float = 60) -> str:
        """Wait for a state of a job; returns it."""
        return wait_for(f"job {job} {pattern}", lambda: self.state(job), pattern, timeout_s)

    def await_nodes(self, state: str, num: int, timeout_s: float = 60) -> None:
        """Wait until so many nodes have a state."""
        look = lambda: self.ask("sinfo", "--noheader", "--partition=main", "--format=%T %D")  # noqa: E731
        wait_for(f"{num} nodes {state}", look, rf"^{state}\W? {num}$", timeout_s)


def wait_for(what: str, look: Callable[[], str], pattern: str, timeout_s: float = 60) -> str:
    """Look until the pattern is found; SystemExit after the time."""
    until, answer = time.monotonic() + timeout_s, ""
    while time.monotonic() < until:
        answer = look()
        if (match := re.search(pattern, answer, re.MULTILINE)) is not None:
            return match[0]
        time.sleep(0.1)
    raise SystemExit(f"{what} did not come: {answer}")
