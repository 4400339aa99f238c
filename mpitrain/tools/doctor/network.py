"""Measures what lies between hosts: clocks, links, TCP ports. Collective, over MPI.

Every wait that can be bounded is; a check that hangs nevertheless is ended by doctor_command.py, from outside.
"""

import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator

_ROUNDS = 20  # of a ping-pong; the fastest one counts
_LINK_S = 0.3  # for each link
_MAX_MESSAGE = 16 << 20
_CONNECT_S = 3.0


class Clock(NamedTuple):
    """The clock of a host against that of rank 0's, in seconds, and the half round trip, which is the error."""

    ahead_s: float
    half_trip_s: float


def clock(comm: Communicator, leaders: Sequence[int]) -> Clock | None:
    """Ping-pong between rank 0 and the first rank of each other host; a value on these ranks. Collective."""
    mine = Clock(0.0, 0.0) if comm.rank == 0 else None
    for other in leaders:
        if other == 0:
            continue
        if comm.rank == 0:
            offset, best = 0.0, float("inf")
            for _ in range(_ROUNDS):
                begin, at = time.perf_counter(), time.time()
                comm.mpi.send(None, other)
                theirs = comm.mpi.recv(source=other)
                half = (time.perf_counter() - begin) / 2
                if half < best:
                    best, offset = half, theirs - (at + half)
            comm.mpi.send(Clock(offset, best), other)
        elif comm.rank == other:
            for _ in range(_ROUNDS):
                comm.mpi.recv(source=0)
                comm.mpi.send(time.time(), 0)
            mine = comm.mpi.recv(source=0)
    return mine


class NetworkLink(NamedTuple):
    """The speed of messages from one rank to another."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float


def links(comm: Communicator, leaders: Sequence[int], places: Sequence[str]) -> list[NetworkLink]:
    """The links between hosts, in a ring, then those between the first two ranks of each host. The same on all ranks. Collective."""
    rounds = [list(pairs) for pairs in ring_rounds(leaders)]
    firsts = comm.all_gather_object(comm.node.all_gather_object(comm.rank)[:2])
    rounds.append([(pair[0], pair[1]) for pair in map(tuple, {tuple(two): two for two in firsts}) if len(pair) == 2])
    mine: list[NetworkLink] = []
    for pairs in rounds:
        comm.barrier()
        for source, target in pairs:
            if comm.rank in (source, target):
                speed, latency = _measure(comm.mpi, source, target)
                if comm.rank == source:
                    mine.append(NetworkLink(places[source], places[target], speed, latency))
    return [link for its in comm.all_gather_object(mine) for link in its]


def ring_rounds(leaders: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The neighbours of a ring, in rounds in which no rank appears twice."""
    neighbours = list(pairwise(leaders))
    yield neighbours[::2]
    yield neighbours[1::2]
    if len(leaders) > 2:
        yield [(leaders[-1], leaders[0])]


def _measure(mpi: Any, source: int, target: int) -> tuple[float, float]:
    """(bytes per second, seconds of an empty message), by messages that grow until one takes a tenth of the time."""
    nbytes, speed, latency = 1, 0.0, float("inf")
    empty = bytearray(0)
    sends, peer = mpi.rank == source, target if mpi.rank == source else source
    begin = time.perf_counter()
    while nbytes:
        nbytes = mpi.sendrecv(nbytes, peer, source=peer) if sends else _told(mpi, peer)
        if not nbytes:
            break
        data = np.zeros(nbytes, np.uint8)
        rounds, speed = (_ROUNDS if nbytes == 1 else 2), 0.0  # the largest messages count: buffers hold smaller ones
        for _ in range(rounds):
            start = time.perf_counter()
            if sends:
                mpi.Send(data, peer)
                mpi.Recv(empty, peer)
            else:
                mpi.Recv(data, peer)
                mpi.Send(empty, peer)
            took = time.perf_counter() - start
            latency = min(latency, took / 2)
            if nbytes > 1:
                speed = max(speed, nbytes / max(took - latency, 1e-9))
        if sends:
            late = took > _LINK_S / 10 or time.perf_counter() - begin > _LINK_S
            is_over = nbytes > 1 and (late or nbytes >= _MAX_MESSAGE)
            nbytes = 0 if is_over else max(nbytes * 4, 1 << 16)
            if not nbytes:
                mpi.sendrecv(0, peer, source=peer)
    return speed, latency


def _told(mpi: Any, peer: int) -> int:
    """The size of the next message, as the sender says it."""
    nbytes: int = mpi.recv(source=peer)
    mpi.send(nbytes, peer)
    return nbytes


class Reach(NamedTuple):
    """Whether one host can connect to a port of another, and the addresses that it tried."""

    source: str
    target: str
    works: bool
    tried: tuple[str, ...]


def ports(comm: Communicator, leaders: Sequence[int], places: Sequence[str]) -> list[Reach]:
    """Each host listens on a port that the system chooses; the hosts before it in a ring, and rank 0's, connect to it. Collective."""
    listener = token = None
    if comm.rank in leaders and len(leaders) > 1:
        token = secrets.token_bytes(16)
        listener = socket.create_server(("", 0))
        threading.Thread(target=answer, args=(listener, token), daemon=True).start()
    offers = comm.all_gather_object(None if listener is None else (_addresses(), listener.getsockname()[1], token))
    mine = []
    if listener is not None:
        at = leaders.index(comm.rank)
        wanted = {leaders[(at + 1) % len(leaders)], *(leaders if comm.rank == leaders[0] else leaders[:1])} - {
            comm.rank
        }
        for other in sorted(wanted):
            addresses, port, expected = offers[other]
            works = any(connects(address, port, expected) for address in addresses)
            mine.append(Reach(places[comm.rank], places[other], works, tuple(addresses)))
    found = comm.all_gather_object(mine)  # all have connected, or failed, before a listener closes
    if listener is not None:
        listener.close()
    return [reach for its in found for reach in its]


def answer(listener: socket.socket, token: bytes) -> None:
    """Send `token` to all who connect, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection, suppress(OSError):
            connection.sendall(token)


def connects(address: str, port: int, token: bytes) -> bool:
    """Whether a listener with this token answers at an address."""
    with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S) as made:
        made.settimeout(_CONNECT_S)
        return made.recv(len(token)) == token  # another host may have the same address
    return False


def _addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, without its own loop."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                its = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found.append(socket.inet_ntoa(its[20:24]))
    return [address for address in found if not address.startswith("127.")]
