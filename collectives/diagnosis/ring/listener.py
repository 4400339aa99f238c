"""Listens for the connections of other ranks (links.py).

Other users of the host, and in the network, may connect before the right rank does, as often as they like, and say anything or nothing.
So a unix socket lies in a folder that only this user may enter, and a process of another user is turned away before it is read from.
Every connection has to pass the handshake (handshake.py). A listener attends to all connections at once, each for a short time.
"""

import errno
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from collectives.diagnosis.ring import handshake
from collectives.diagnosis.ring.addresses import family_of
from collectives.diagnosis.ring.handshake import Words
from collectives.diagnosis.ring.links import (
    HANDSHAKE_S,
    PAUSE_S,
    Link,
    ListenerPlace,
    is_of_this_user,
    made_ready,
    short_path,
)
from collectives.environment import memory_folder

_NUM_PENDING, _PART_OF_FILES = 256, 8
"""The most connections in the handshake of all listeners, and the part of the process's open files that they may be. Of more the
oldest one is closed. A rank whose connection was closed comes again."""


class Listener:
    """Accepts the one connection of another rank. `own_addresses`: of this host, to listen on; None: that rank is on this node."""

    def __init__(self, own_addresses: Sequence[str] | None) -> None:
        self._found: Link | None = None
        self._sockets: list[socket.socket] = []
        self._folder: Path | None = None
        self._waker, self._wake = socket.socketpair()
        key = secrets.token_bytes(handshake.KEY_BYTES)
        if own_addresses is None:
            self.place = ListenerPlace(self._listen_here(), (), key)
        else:
            self.place = ListenerPlace("", tuple(self._listen_on(own_addresses)), key)
        self._thread = threading.Thread(target=self._accept, name="collectives-ring", daemon=True)
        if self._sockets:  # else the other rank does not reach this one
            self._thread.start()

    def _listen_here(self) -> str:
        """Listen on a unix socket; returns its path, or "" if there is none."""
        name = f"mpitrain-{os.getpid()}-{secrets.token_hex(16)}"
        with suppress(OSError):
            listener = socket.socket(socket.AF_UNIX)
            self._sockets.append(listener)
            try:
                path = memory_folder() / name
                path.mkdir(0o700)
                self._folder = path
                with short_path(path / "ring") as short:
                    listener.bind(short)
                name = str(path / "ring")
            except OSError:  # a folder that is full or read-only, or whose file system has no sockets
                name = f"\0{name}"  # an abstract name. Any process may connect to it.
                listener.bind(name)
            listener.listen(socket.SOMAXCONN)
            return name
        return ""

    def _listen_on(self, own_addresses: Sequence[str]) -> Iterator[tuple[str, int]]:
        for address in own_addresses:
            with suppress(OSError):
                listener = socket.create_server((address, 0), family=family_of(address), backlog=socket.SOMAXCONN)
                self._sockets.append(listener)
                yield address, listener.getsockname()[1]

    def _accept(self) -> None:
        with _Door(self.place.key, [self._waker, *self._sockets]) as door:
            while door.attend():
                if (taken := door.taken) is not self._found:
                    if self._found is not None:
                        self._found.socket.close()  # the other rank has given it up, and come again
                    self._found = taken

    def close(self, *, expected: bool) -> Link | None:
        """Stop listening. Returns the connection, if the other rank says that it has been made: `expected`."""
        self._wake.close()
        if self._thread.is_alive():
            self._thread.join()
        for each in (self._waker, *self._sockets):
            each.close()
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / "ring").unlink(missing_ok=True)
                self._folder.rmdir()
        if not expected and self._found is not None:
            self._found.socket.close()
            return None
        return self._found


class _Door:
    """Attends to all connections of the sockets of a listener at once, until its waker can be read."""

    num_open = 0
    counting = threading.Lock()

    def __init__(self, key: bytes, sockets: Sequence[socket.socket]) -> None:
        self.taken: Link | None = None
        """The last connection that has passed."""
        self._key, self._waker = key, sockets[0]
        self._listeners = set(sockets[1:])
        self._pending: dict[socket.socket, _Pending] = {}  # in the order of their arrival
        self._selector = selectors.DefaultSelector()
        for each in sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)

    def __enter__(self) -> "_Door":
        with _Door.counting:
            _Door.num_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _Door.counting:
            _Door.num_open -= 1
        for connection in [*self._pending]:
            self._drop(connection)
        self._selector.close()

    def attend(self) -> bool:
        """Wait for the next events, and attend to them. False at the end."""
        until = next(iter(self._pending.values())).until if self._pending else None
        events = self._selector.select(None if until is None else max(0.0, until - time.monotonic()))
        for key, _ in events:
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready is self._waker:
                return False
            if ready in self._pending:
                self._hear(ready)
            elif ready in self._listeners:  # else it was dropped just now
                self._let_in(ready)
        now, most = time.monotonic(), self._most_pending()
        for oldest in [*self._pending]:
            if len(self._pending) <= most and self._pending[oldest].until > now:
                break
            self._drop(oldest)
        return True

    @staticmethod
    def _most_pending() -> int:
        """A listener's share of what the process has for strangers: it may have many listeners, and needs files for other things."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _NUM_PENDING if files == resource.RLIM_INFINITY else min(_NUM_PENDING, files // _PART_OF_FILES)
        return max(1, most // max(1, _Door.num_open))

    def _let_in(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # it was given up; or there are too many open files
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._drop(next(iter(self._pending))) if self._pending else time.sleep(PAUSE_S)
            return
        if not is_of_this_user(connection):
            connection.close()
            return
        with suppress(OSError):
            connection.setblocking(False)
            self._pending[connection] = _Pending(self._key, connection, time.monotonic() + HANDSHAKE_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Read from a connection. It is dropped unless it says the right thing."""
        try:
            words = self._pending[connection].hear()
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        if words is not None:
            del self._pending[connection]
            self._selector.unregister(connection)
            self.taken = Link(made_ready(connection), words.secret())

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()


class _Pending:
    """The listener's part of a handshake."""

    def __init__(self, key: bytes, connection: socket.socket, until: float) -> None:
        self.until = until
        self._key, self._connection = key, connection
        self._data = b""
        self._words: Words | None = None  # after the hello

    def hear(self) -> Words | None:
        """Read what is there, and answer; the words at the end of the handshake. OSError if the other side is not the right one."""
        wanted = handshake.HELLO_BYTES if self._words is None else handshake.PROOF_BYTES
        data = self._connection.recv(wanted - len(self._data))  # never more: what follows is not of the handshake
        self._data += data
        if not data:
            raise ConnectionResetError
        if len(self._data) < wanted:
            return None
        said, self._data = self._data, b""
        if self._words is not None:
            if not handshake.is_same(said, self._words.proof()):
                raise ConnectionRefusedError
            self._send(self._words.receipt())
            return self._words
        if (nonce := handshake.nonce_of(said)) is None:
            raise ConnectionRefusedError
        ends = handshake.ends_of(self._connection, of_connector=False)
        self._words = Words(self._key, nonce, handshake.nonce(), ends)
        self._send(self._words.answer())
        return None

    def _send(self, data: bytes) -> None:
        if self._connection.send(data) < len(data):  # the first bytes of a connection have room
            raise ConnectionAbortedError
