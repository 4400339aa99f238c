"""`python -m mpitrain`."""

import sys

# Before all that needs more than the standard library, because a head node may have no more.
if __name__ == "__main__" and sys.argv[1:2] == ["elastic"]:
    from mpitrain.elastic.supervisor.command import main as elastic

    raise SystemExit(elastic(sys.argv[2:]))

from mpitrain.elastic import marks
from mpitrain.train import stop

# Before all other imports: without a handler, a request to stop would end the process.
stop.listen()
marks.starting()

from mpitrain.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
