"""What a supervisor asks of Slurm for the job that it is in: whether the job may go on, and its return to the queue."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from mpitrain.elastic.marks import whole
from mpitrain.files import read_object, replace

QUEUE = ".requeue"
MAX_FRUITLESS = 2
"""So many jobs in a row may do no new step. More would not help: the limit of time may be shorter than the lead of the signal that asks
to stop ahead of it."""
_ANSWER_S = 10.0
_GOES_ON = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "CONFIGURING")


def is_batch_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a batch system ends this job by SIGTERM, perhaps several times, and later by SIGKILL."""
    return any(environ.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID"))


def ending_state(environ: Mapping[str, str] = os.environ) -> str:
    """The state of this process's job, such as COMPLETING, if Slurm has begun to end it: by scancel, a requeue, preemption or the limit
    of time. Else "", also without an answer. A job that has lost a node, and may go on without it, runs."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    try:
        words = ["squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer[0] if answer and answer[0] not in _GOES_ON else ""


class Queue:
    """The returns of a run to Slurm's queue. They are counted in the run's folder, for the supervisors of later jobs."""

    def __init__(self, folder: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._path, self._say, self._job = folder / QUEUE, say, environ.get("SLURM_JOB_ID", "")
        self._fruitless = 0
        if environ.get("SLURM_RESTART_COUNT", "0") != "0":  # a job that was submitted anew begins to count anew
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._fruitless = whole(read_object(self._path)["fruitless"])

    def enter(self, *, has_new_step: bool) -> bool:
        """Have Slurm queue this job again; whether it does. Slurm then ends the job, so nothing may follow.

        `has_new_step`: whether this job did a step that no earlier job of the run had done.
        """
        fruitless = 0 if has_new_step else self._fruitless + 1
        with contextlib.suppress(OSError):  # a full disk
            replace(self._path, json.dumps({"job": self._job, "fruitless": fruitless}).encode() + b"\n")
        if fruitless >= MAX_FRUITLESS:
            self._say(
                f"not queued again: {fruitless} jobs in a row did no new step. Is the job's --time longer than the lead of "
                "--signal, and the start of the run?"
            )
            return False
        command = ("scontrol", "requeue", self._job)
        self._say(f"{' '.join(command)}: the job waits in the queue, and then goes on")
        try:
            subprocess.run(command, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"the job is not in the queue again: {error}")
            return False
        return True
