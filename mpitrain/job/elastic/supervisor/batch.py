"""What a supervisor asks of Slurm for the job that it is in: whether the job may go on, and its return to the queue."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.files import read_object, replace
from mpitrain.job.record.files.marks import whole

QUEUE = ".requeue"
MAX_FRUITLESS = 2
"""So many jobs in a row may do and save no new step. More would not help: what has kept them from one will keep the next ones."""
_ANSWER_S = 10.0
GOES_ON = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "CONFIGURING")


def is_batch_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a job of a batch system, a user's shell of one included."""
    return any(environ.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID"))


def is_unattended(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a batch system ends this process by SIGTERM, perhaps several times, and later by SIGKILL. Not so in a shell of salloc or
    of an interactive job of PBS, where a user does it."""
    if environ.get("SLURM_JOB_ID"):
        is_on_node = bool(environ.get("SLURMD_NODENAME")) and not environ.get("SLURM_PTY_PORT")
        return is_on_node or environ.get("ENVIRONMENT") == "BATCH"
    return bool(environ.get("PBS_JOBID")) and environ.get("PBS_ENVIRONMENT") != "PBS_INTERACTIVE"


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name by which Slurm's commands know this process's job alone; "" outside of Slurm.

    One task of an array has the number of the whole array, and commands that are given this number are about all tasks. The other tasks
    have numbers of their own, and so has a job that a task has submitted: its variables of an array are that task's.
    """
    job, task = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{job}_{task}" if job and task and environ.get("SLURM_ARRAY_JOB_ID") == job else job


def job_state(environ: Mapping[str, str] = os.environ) -> str:
    """What Slurm says of this process's job, such as RUNNING or COMPLETING; "" outside of Slurm, and without an answer."""
    job = job_name(environ)
    if not job:
        return ""
    try:
        words = ["squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T"]
        answer = subprocess.run(
            words, env=_of_own_job(), capture_output=True, text=True, timeout=_ANSWER_S, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer[0] if answer else ""


def ending_state(environ: Mapping[str, str] = os.environ) -> str:
    """The state of this process's job, such as COMPLETING, if Slurm has begun to end it: by scancel, a requeue, preemption or the limit
    of time. Else "", also without an answer. A job that has lost a node, and may go on without it, runs."""
    state = job_state(environ)
    return "" if state in GOES_ON else state


def _of_own_job() -> dict[str, str]:
    """The environment for a command that asks about this job: settings for squeue or for other clusters would hide it."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_") and name != "SLURM_CLUSTERS"
    }


class Queue:
    """The returns of a run to Slurm's queue. They are counted in the run's folder, for the supervisors of later starts of the job.

    `saved`: the step of the newest checkpoint, from which this job goes on; 0 if there is none, as of a program that has its own kind.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ, *, saved: int = 0
    ) -> None:
        self._path, self._say, self._job = folder / QUEUE, say, job_name(environ)
        self._fruitless = 0
        self._earlier: dict[str, int] | None = None
        self.best_step = self.best_saved = 0
        """the greatest step that earlier jobs did, and the greatest one that they saved: steps that were lost are done once more"""
        if environ.get("SLURM_RESTART_COUNT", "0") != "0":  # a job that was submitted anew begins to count anew
            self._read()
        self.go_on_from(saved)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = read_object(self._path)
            fruitless, step = whole(record["fruitless"]), whole(record["step"])
            if record["job"] == self._job:
                self._fruitless, self.best_step, self.best_saved = fruitless, step, whole(record.get("saved", 0))
                # Inodes may have 64 bits.
                self._earlier = {name: int(inode) for name, inode in record["earlier"].items()}

    def go_on_from(self, saved: int) -> None:
        """This job goes on from this step. Between two returns that were asked for here, Slurm itself may have queued the job again,
        after new steps."""
        if saved > self.best_saved:
            self._fruitless, self.best_saved = 0, saved
        self.best_step = max(saved, self.best_step)

    def earlier(self, there: dict[str, int]) -> dict[str, int]:
        """The checkpoints, as names and inodes, that were there before the first one of the jobs that are counted together: `there`, if
        this is that job. For a run that begins with a checkpoint that the user has named: later jobs go on with the run's own ones."""
        if self._earlier is None and self._job:
            self._earlier = there
            self._note(self._fruitless, self.best_step, self.best_saved)
        return there if self._earlier is None else self._earlier

    def _note(self, fruitless: int, step: int, saved: int) -> None:
        record: dict[str, Any] = {"job": self._job, "fruitless": fruitless, "step": step, "saved": saved}
        record |= {} if self._earlier is None else {"earlier": self._earlier}
        with contextlib.suppress(OSError):  # a full disk
            replace(self._path, json.dumps(record).encode() + b"\n")

    def enter(self, *, has_new_step: bool, step: int = 0, saved: int = 0, hint: str = "") -> bool:
        """Have Slurm queue this job again; whether it does. Slurm then ends the job, so nothing may follow.

        `has_new_step`: whether this job did, or saved, a step that no earlier job of the run had done, or saved. `step`: the greatest
        one that it did. `saved`: that of the newest checkpoint. `hint`: said if the job is not queued again, because it is one of
        several in a row without a new step.
        """
        fruitless = 0 if has_new_step else self._fruitless + 1
        step, saved = max(step, self.best_step), max(saved, self.best_saved)
        self._note(fruitless, step, saved)
        if fruitless >= MAX_FRUITLESS:
            so_far = f"the greatest was {step}, the greatest in a checkpoint {saved or 'none'}"
            self._say(f"not queued again: {fruitless} jobs in a row did no new step ({so_far}){hint and '. '}{hint}")
            return False
        command = ("scontrol", "requeue", self._job)
        self._say(f"{' '.join(command)}: the job waits in the queue, and then goes on")
        # Slurm at once sends SIGTERM to all processes of the job, perhaps before the command has read Slurm's answer.
        words = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh", *command)
        try:
            code = subprocess.run(words, env=_of_own_job(), timeout=60).returncode
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"the job is not in the queue again: {error}")
            return False
        if code:
            self._say(f"the job is not in the queue again: exit code {code} of {command[0]}")
        return code == 0
