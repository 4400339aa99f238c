"""The connections of the ring of ranks (goodbye.py): a unix socket within a node, TCP with keepalive between nodes.

A connection is made by a handshake (handshake.py) with a listener (listener.py). A rank whose connection fails tries again: strangers
may have been in the way.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from collectives.diagnosis.ring import handshake
from collectives.diagnosis.ring.addresses import addresses, by_distance, family_of

_CONNECT_S = 1.0  # for one address: a firewall may drop the packets
_NUM_UNANSWERED = 2  # connections that an address may leave without an answer, as behind a firewall, or flooded
HANDSHAKE_S = 2.0
_ALL_S = 5.0  # for all tries to reach a listener
PAUSE_S, _MAX_PAUSE_S = 0.01, 0.3  # between the tries

# A silent host is detected after 10 s: the kernel asks after 4 s without data, every 2 s. The other host's kernel answers, also if the
# process there is stopped or a thread holds the GIL. So a silent host is not mistaken for a slow rank, which heartbeats by threads
# could not tell apart, and the probes cost the ranks no time.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (
        socket.IPPROTO_TCP,
        socket.TCP_USER_TIMEOUT,
        10_000,
    ),  # milliseconds; also limits the wait for a goodbye's acknowledgement
)


class ListenerPlace(NamedTuple):
    """Where a listener listens: the path or name of a unix socket, or addresses with ports. `key`: see handshake.py."""

    name: str
    addresses: tuple[tuple[str, int], ...]
    key: bytes


class Link(NamedTuple):
    """A connection, and a key that only its two ends know."""

    socket: socket.socket
    secret: bytes


def connect(place: ListenerPlace) -> Link | None:
    """A connection to the listener at `place`, or None if it cannot be reached. Tries again while strangers may be in the way."""
    end = time.monotonic() + _ALL_S
    targets: list[str | tuple[str, int]] = [place.name] * bool(place.name)
    if place.addresses:
        order = by_distance([address for address, _ in place.addresses], addresses())
        targets += sorted(place.addresses, key=lambda each: order.index(each[0]))
    unanswered: dict[str | tuple[str, int], int] = {}
    pause_s = PAUSE_S
    while targets:
        for target in targets.copy():
            if time.monotonic() >= end:
                return None
            try:
                return _connected(target, place.key, end)
            except (ConnectionResetError, ConnectionAbortedError, BlockingIOError):
                continue  # a stranger may have taken the room of this connection
            except TimeoutError as error:
                unanswered[target] = unanswered.get(target, 0) + (not isinstance(error, _SilenceError))
                if unanswered[target] < _NUM_UNANSWERED:
                    continue
            except OSError:  # nobody listens there, there is no way, or it is another listener
                pass
            targets.remove(target)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return None


class _SilenceError(TimeoutError):
    """A connection was made, and the other side has not ended the handshake in time."""


def _connected(target: str | tuple[str, int], key: bytes, end: float) -> Link:
    """A connection to one address. OSError: ConnectionRefusedError if the right listener is not there."""
    made = socket.socket(socket.AF_UNIX if isinstance(target, str) else family_of(target[0]))
    try:
        made.settimeout(max(0.01, min(_CONNECT_S, end - time.monotonic())))
        if isinstance(target, str):
            with short_path(Path(target)) if not target.startswith("\0") else contextlib.nullcontext(target) as short:
                made.connect(short)
        else:
            made.connect(target)
        if not is_of_this_user(made):
            raise ConnectionRefusedError
        return Link(made, _shake_hands(made, key, min(time.monotonic() + HANDSHAKE_S, end)))
    except BaseException:
        made.close()
        raise


def _shake_hands(made: socket.socket, key: bytes, until: float) -> bytes:
    """The connector's part of a handshake; returns the secret of the connection, which is ready then. OSError as in `_connected`."""
    nonce = handshake.nonce()
    try:
        made.sendall(handshake.hello(nonce))
        answer = _received(made, handshake.ANSWER_BYTES, until)
        words = handshake.words_of(key, nonce, answer, handshake.ends_of(made, of_connector=True))
        if words is None:
            raise ConnectionRefusedError
        made.sendall(words.proof())
        if not handshake.is_same(_received(made, handshake.RECEIPT_BYTES, until), words.receipt()):
            raise ConnectionRefusedError
    except TimeoutError:
        raise _SilenceError from None
    except BrokenPipeError:
        raise ConnectionResetError from None
    made_ready(made)
    return words.secret()


def _received(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not (more := connection.recv(num_bytes - len(data))):
            raise ConnectionResetError
        data += more
        if time.monotonic() > until:
            raise TimeoutError
    return data


def made_ready(connection: socket.socket) -> socket.socket:
    if connection.family != socket.AF_UNIX:
        for level, option, value in _KEEPALIVE:
            connection.setsockopt(level, option, value)
    connection.setblocking(False)
    return connection


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process on the other side of a unix socket is of this user. TCP does not tell."""
    if connection.family != socket.AF_UNIX:
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path of a unix socket, because its own may have more than the 107 bytes that the system takes."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
