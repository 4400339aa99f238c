"""`python -m mpitrain`."""

import atexit
import sys
import threading
from typing import NoReturn

# Before all that needs more than the standard library, because a head node may have no more.
if __name__ == "__main__" and sys.argv[1:2] == ["elastic"]:
    from mpitrain.job.elastic.supervisor.requests import SignalRequests

    requests = (
        SignalRequests()
    )  # first: a request that comes during the imports, or while mpirun and Slurm are asked, counts
    from mpitrain.job.elastic.supervisor.elastic_command import main as elastic

    raise SystemExit(elastic(sys.argv[2:], requests))

from mpitrain.job.record.files import marks
from mpitrain.job.train import stop

# Before all other imports: without a handler, a request to stop would end the process. A word that is no setting names a command.
stop.listen(trains=sys.argv[1:2] in ([], ["train"]) or sys.argv[1].startswith("-"))
marks.starting()

from collectives.diagnosis.ending import end_process  # noqa: E402
from mpitrain.cli import main  # noqa: E402


def _leave(code: int) -> NoReturn:
    """End as Python does, except that the modules are not destroyed: with torch that takes 0.3 s of a core for each rank."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(code)


if __name__ == "__main__":
    _leave(main())
