"""The open group of a communicator: it collects the operations issued within `with comm.group():`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

from collectives.arrays.buffer import is_jax
from collectives.diagnosis.record import Log
from collectives.diagnosis.stacks import Site, issued_here
from collectives.diagnosis.threads import refusal
from collectives.transports.call import Call
from collectives.transports.message import Message


class WaitingCall(NamedTuple):
    """A collective that waits for the end of its group."""

    call: Call
    carry_out: Callable[[], Any]
    site: Site


class WaitingMessage(NamedTuple):
    """A message that waits for the end of its group."""

    message: Message
    site: Site


class Group:
    """The operations between the two ends of `with comm.group():`, in the order in which they were issued."""

    def __init__(self, communicator: str) -> None:
        """`communicator`: its name in error messages."""
        self._communicator, self._thread = communicator, get_ident()
        self.calls: list[WaitingCall] = []
        self.messages: list[WaitingMessage] = []
        self._error: BaseException | None = None

    def add(self, call: Call, carry_out: Callable[[], Any], result: Any) -> None:
        """Add a collective whose result is written to `result`."""
        self._check_thread(call.operation)
        _refuse_jax(call.operation, result)
        self.calls.append(WaitingCall(call, carry_out, issued_here()))

    def add_message(self, operation: str, message: Message, result: Any = None) -> None:
        """Add a `send` or `recv`."""
        self._check_thread(operation)
        _refuse_jax(operation, result)
        self.messages.append(WaitingMessage(message, issued_here()))

    @contextmanager
    def within(self) -> Iterator[None]:
        """A group nested in this one, which adds its operations here. An exception that leaves it discards the whole group."""
        self._check_thread("group")
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def refuse_discarded(self) -> None:
        """ValueError if an exception left a nested group, which discards the whole group."""
        if self._error is not None:
            raise ValueError(
                "group: no operation ran, because a group within this one ended with an exception; let the exception leave this group "
                "too, or issue the operations outside"
            ) from self._error

    def _check_thread(self, operation: str) -> None:
        """RuntimeError if another thread issues an operation while this thread's group is open."""
        if get_ident() != self._thread:
            raise refusal(operation, self._communicator, "a group")


class Groups:
    """The groups of the communicator of `log`: `current` is the open group, None outside of a group."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.current: Group | None = None

    def open(self) -> Group:
        """Begin a group, which collects the operations issued until `close`."""
        self.current = Group(str(self._log))
        return self.current

    def close(self) -> None:
        """End the group; operations issued from now on belong to no group."""
        self.current = None


def _refuse_jax(operation: str, result: Any) -> None:
    if is_jax(result):
        raise ValueError(f"group: {operation} of a JAX array returns a new array; call {operation} outside the group")
