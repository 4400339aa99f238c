"""Wakes the monitor at SIGUSR2 while the main thread is inside MPI: Python's own handlers would wait until it returns."""

import os
import select
import signal
from contextlib import suppress


class Bell:
    """A pipe that wakes a waiting thread. Python's C-level handler writes a signal's number to it at once, whatever the threads do."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._poll = select.poll()  # select() does not accept descriptors above 1023
        self._poll.register(self._read, select.POLLIN)
        os.register_at_fork(after_in_child=self._forked)

    def add(self, fd: int) -> None:
        """Wake the waiting thread also when `fd` is readable, until `remove`."""
        self._poll.register(fd, select.POLLIN)

    def remove(self, fd: int) -> None:
        """Undo `add`, if it was called."""
        with suppress(KeyError):
            self._poll.unregister(fd)

    def ring_at_signal(self) -> None:
        """Ring at SIGUSR2, unless the user's program handles it. Called from the main thread."""
        if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
            return
        other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if other != -1:
            # The event loop of another library uses the wake-up descriptor, so only the main thread can handle the signal.
            signal.set_wakeup_fd(other)
            signal.signal(signal.SIGUSR2, self._handle)
        else:
            signal.signal(signal.SIGUSR2, _heard)

    def ring(self, number: int = 0) -> None:
        """Wake the waiting thread."""
        with suppress(OSError):
            os.write(self._write, bytes([number]))

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, at most `seconds`. Returns whether SIGUSR2 has rung and no other code handles that signal now."""
        rung = any(fd == self._read for fd, _ in self._poll.poll(seconds * 1000))
        heard = os.read(self._read, 4096) if rung else b""
        return signal.SIGUSR2 in heard and signal.getsignal(signal.SIGUSR2) in (_heard, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        self.ring(signum)

    def _forked(self) -> None:
        """Stop the use of the parent's pipe in a forked child. mpirun sends SIGUSR2 to children too, which must not end them."""
        with suppress(ValueError, OSError):
            fd = signal.set_wakeup_fd(-1)
            if fd not in (-1, self._write):
                signal.set_wakeup_fd(fd)
            if signal.getsignal(signal.SIGUSR2) == self._handle:
                signal.signal(signal.SIGUSR2, _heard)


def _heard(signum: int, frame: object) -> None:
    """A handler that does nothing: the wake-up descriptor has rung the bell."""
