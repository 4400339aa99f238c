"""The Work that `async_op=True` returns."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Work(ABC):
    """An asynchronous operation: `wait()` returns its result, `done()` whether it has ended.

    Its arrays stay alive until the operation has ended, even if the program has dropped the Work.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self.is_known = False  # whether the program has seen the end, and so may use the arrays

    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has ended. Without a progress thread `done` carries it out if all ranks have issued it."""

    @abstractmethod
    def _finish(self) -> None: ...

    def wait(self) -> Any:
        """Block until the operation has ended and return its result. Its errors are raised here. Idempotent."""
        if not self._ended:
            self._finish()
        self.is_known = True
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, operation: Callable[[], Any]) -> None:
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error
        self._ended = True


class Ended(Work):
    """An operation that has ended before its call returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._end(lambda: result)

    def done(self) -> bool:
        return True

    def _finish(self) -> None:
        raise AssertionError("an operation that has ended is not carried out")


class Queued(Work):
    """A queued operation. `issuer`: the ident of the thread that has issued it."""

    def __init__(self) -> None:
        super().__init__()
        self.issuer = threading.get_ident()

    @property
    def is_left(self) -> bool:
        """Whether the operation has not ended. Unlike `done`, this never carries it out."""
        return not self._ended

    @abstractmethod
    def hand_over(self) -> None:
        """Called when another thread uses the communicator: end this operation first, unless its own thread is in a call (an error)."""
