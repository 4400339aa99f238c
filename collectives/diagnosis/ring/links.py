"""The connections of the ring of ranks (goodbye.py): a unix socket within a node, TCP with keepalive between nodes.

A host may have addresses that other hosts cannot reach, or that another host has too (bridges of containers). So a listener publishes
all its addresses with a random token, and the token decides whether the connection is the right one.
"""

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

_CONNECT_S = 1.0  # for one address: a firewall may drop the packets
_TOKEN_S = 2.0  # for the other side's half of the token
_ALL_S = 5.0  # for all addresses of a listener
_HALF = 16  # bytes of a token that each side sends

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

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1
_GLOBAL_SCOPE = "00"  # of an address in /proc/net/if_inet6


class Place(NamedTuple):
    """Where a listener listens: the name of a unix socket, or addresses with a port."""

    name: str
    addresses: tuple[str, ...]
    port: int
    token: bytes


class Listener:
    """Accepts the one connection of the rank before this one. `local`: that rank is on this node."""

    def __init__(self, *, local: bool) -> None:
        self._local = local
        self._found: socket.socket | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="collectives-ring", daemon=True)
        token = secrets.token_bytes(2 * _HALF)
        self.place = Place("", (), 0, token)
        self._socket: socket.socket | None = None
        with suppress(OSError):  # then the other rank does not reach this one
            if local:
                name = f"\0mpitrain-{os.getpid()}-{secrets.token_hex(16)}"  # an abstract name, so that no file remains
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(name)
                self._socket.listen()
                self.place = Place(name, (), 0, token)
            else:
                self._socket = _tcp_listener()
                self.place = Place("", tuple(addresses()), self._socket.getsockname()[1], token)
            self._thread.start()

    def _accept(self) -> None:
        listener, token = self._socket, self.place.token
        assert listener is not None
        listener.settimeout(0.1)
        while not self._stop.is_set():
            try:
                found, _ = listener.accept()
            except OSError:  # the time limit, or a connection that was given up
                continue
            with suppress(OSError):
                found.settimeout(_TOKEN_S)
                if compare_digest(_received(found, _HALF), token[:_HALF]):
                    found.sendall(token[_HALF:])
                    self._found = _ready(found, local=self._local)
                    return
            found.close()

    def close(self, *, expected: bool) -> socket.socket | None:
        """Stop listening. Returns the connection, if the other rank says that it has been made: `expected`."""
        if not expected:
            self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TOKEN_S + 1.0)
            self._stop.set()
        if self._socket is not None:
            self._socket.close()
        if not expected and self._found is not None:
            self._found.close()
            return None
        return self._found


def connect(place: Place) -> socket.socket | None:
    """A connection to the listener at `place`, or None if it cannot be reached."""
    end = time.monotonic() + _ALL_S
    if place.name:
        return _connected(socket.AF_UNIX, place.name, place.token)
    for address in by_distance(place.addresses, addresses()):
        if time.monotonic() < end:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if (made := _connected(family, (address, place.port), place.token)) is not None:
                return made
    return None


def _connected(family: int, address: str | tuple[str, int], token: bytes) -> socket.socket | None:
    """A connection to one address, if the right listener is there."""
    try:
        made = socket.socket(family)
    except OSError:  # no IPv6 here
        return None
    with suppress(OSError):
        made.settimeout(_CONNECT_S)
        made.connect(address)
        made.settimeout(_TOKEN_S)
        made.sendall(token[:_HALF])
        if compare_digest(_received(made, _HALF), token[_HALF:]):
            return _ready(made, local=family == socket.AF_UNIX)
    made.close()
    return None


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (more := connection.recv(num_bytes - len(data))):
        data += more
    return data


def _ready(connection: socket.socket, *, local: bool) -> socket.socket:
    if not local:
        for level, option, value in _KEEPALIVE:
            connection.setsockopt(level, option, value)
    connection.setblocking(False)
    return connection


def _tcp_listener() -> socket.socket:
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def addresses() -> list[str]:
    """The addresses of this host's interfaces that are up."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an IPv4 address
                (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
                if flags & _IFF_UP:
                    found.append(socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def by_distance(theirs: Sequence[str], mine: Iterable[str]) -> list[str]:
    """The addresses of another host, most promising first: those in a network of this host, and last those that this host has too."""
    own = [ipaddress.ip_address(address) for address in mine]

    def shared_bits(address: str) -> int:
        other = ipaddress.ip_address(address)
        return max(
            (
                other.max_prefixlen - (int(other) ^ int(each)).bit_length()
                for each in own
                if each.version == other.version
            ),
            default=0,
        )

    return sorted(
        theirs, key=lambda address: (ipaddress.ip_address(address) in own, ":" in address, -shared_bits(address))
    )
