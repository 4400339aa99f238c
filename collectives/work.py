"""Operations in flight."""

from collections.abc import Callable
from typing import Any


class Work:
    """What `async_op=True` returns: `wait()` gives the operation's result, `done()` tells whether it would return at once.

    Buffers stay alive until `wait()`. The MPI library's own collectives run as its non-blocking ones; all other algorithms have
    ended when the call returns, so the same program is right on both, only not overlapped.
    """

    def __init__(self, result: Any, request: Any = None, finish: Callable[[], None] | None = None) -> None:
        self._result, self._request, self._finish = result, request, finish

    def done(self) -> bool:
        """Whether the operation has ended; also gives MPI a chance to progress it."""
        return self._request is None or bool(self._request.Test())

    def wait(self) -> Any:
        """Block until the operation has ended and return its result. Errors of the operation are raised here. Idempotent."""
        if self._request is not None:
            self._request.Wait()
            self._request = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result
