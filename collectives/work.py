"""Operations in flight."""

from collections.abc import Callable
from typing import Any, ClassVar


class Work:
    """What `async_op=True` returns: `wait()` gives the operation's result, `done()` tells whether it would return at once.

    Buffers stay alive until `wait()`, also where nobody holds the Work: MPI may still write to them. The MPI library's own
    collectives run as its non-blocking ones; all other algorithms have ended when the call returns, so the same program is right
    on both, only not overlapped.
    """

    _in_flight: ClassVar[set["Work"]] = set()

    def __init__(self, result: Any, request: Any = None, finish: Callable[[], None] | None = None) -> None:
        self._result, self._request, self._finish = result, request, finish
        if request is not None:
            self._in_flight.add(self)

    def done(self) -> bool:
        """Whether the operation has ended; also gives MPI a chance to progress it."""
        return self._request is None or bool(self._request.Test())

    def wait(self) -> Any:
        """Block until the operation has ended and return its result. Errors of the operation are raised here. Idempotent."""
        if self._request is not None:
            self._request.Wait()
            self._request = None
            self._in_flight.discard(self)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result
