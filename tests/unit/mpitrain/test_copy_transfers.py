"""Transfers of copies to another node: what comes is what was sent, and nothing else is believed."""

import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from collectives.diagnosis.ring.links import Link
from mpitrain.job.elastic.copies.transfers import ChangedError, Head, Transfers

SECRET = os.urandom(32)
HEADER, DATA = b'{"step": 7}', np.arange(1 << 19, dtype=np.uint8)  # more than the pieces in which it goes
HEAD_BYTES, MAC_BYTES = 24, 32
BODY_AT = HEAD_BYTES + MAC_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    one, other = socket.socketpair()
    for each in (one, other):
        each.settimeout(10.0)
    with one, other:
        yield one, other


def sending(link: Transfers, *, num: int = 1) -> tuple[threading.Thread, list[OSError]]:
    """Send copies in a thread, of which the k-th has the generation k."""
    errors: list[OSError] = []

    def send() -> None:
        try:
            for number in range(num):
                link.send(number, HEADER, (DATA + np.uint8(number)).data)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    return thread, errors


def received(link: Transfers) -> tuple[Head, bytes, np.ndarray]:
    head = link.head()
    assert head is not None
    data = np.zeros(head.nbytes, np.uint8)
    header = link.body(head, data.data)
    link.answer()
    return head, header, data


def recorded(num: int = 1) -> list[bytes]:
    """What a sender sends for so many copies."""
    one, other = socket.socketpair()
    with one, other:
        thread, errors = sending(Transfers(Link(one, SECRET)), num=num)
        found = []
        answering = Transfers(Link(other, SECRET))
        for _ in range(num):
            length = BODY_AT + len(HEADER) + DATA.size + MAC_BYTES
            data = bytearray()
            while len(data) < length:
                data += other.recv(length - len(data))
            found.append(bytes(data))
            answering.answer()
        thread.join()
        assert errors == []
    return found


def test_copies_arrive(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    thread, errors = sending(Transfers(Link(one, SECRET)), num=3)
    keeping = Transfers(Link(other, SECRET))
    for number in range(3):
        head, header, data = received(keeping)
        assert (head.generation, header) == (number, HEADER) and (data == DATA + np.uint8(number)).all()
    thread.join()
    one.close()
    assert errors == [] and keeping.head() is None


def flipped(at: int) -> Callable[[list[bytes]], bytes]:
    def change(sent: list[bytes]) -> bytes:
        data = bytearray(sent[0])
        data[at] ^= 1
        return bytes(data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(
            flipped(at)
            for at in (0, 8, 23, HEAD_BYTES, BODY_AT - 1, BODY_AT, BODY_AT + len(HEADER), -MAC_BYTES - 1, -1)
        ),
        lambda sent: sent[1],  # reordered
        lambda sent: sent[0][:BODY_AT] + sent[1][BODY_AT:],
        lambda sent: struct.pack("<3Q", 0, 1 << 63, 1 << 63) + bytes(100),
        lambda sent: struct.pack("<3Q", 0, 1 << 40, 1 << 40) + sent[0][HEAD_BYTES:],
        lambda sent: os.urandom(200),
    ],
)
def test_what_was_changed_on_its_way_is_not_believed(
    change: Callable[[list[bytes]], bytes], ends: tuple[socket.socket, socket.socket]
) -> None:
    one, other = ends
    data = change(recorded(2))

    def send() -> None:
        with suppress(OSError):
            one.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    tracemalloc.start()
    with pytest.raises(ChangedError, match="changed on its way"):
        received(Transfers(Link(other, SECRET)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24, "no memory for a length that nobody has vouched for"
    tracemalloc.stop()
    other.close()
    thread.join()


@pytest.mark.parametrize("num_bytes", [1, HEAD_BYTES, BODY_AT, BODY_AT + 5, -1])
def test_a_copy_that_was_cut_is_no_copy(num_bytes: int, ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    sent = recorded()[0][:num_bytes]
    thread = threading.Thread(target=lambda: (one.sendall(sent), one.shutdown(socket.SHUT_WR)))
    thread.start()
    with pytest.raises(ConnectionResetError, match="has ended"):
        received(Transfers(Link(other, SECRET)))
    thread.join()


def test_a_copy_that_is_sent_again_is_not_believed(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    sent = recorded()[0]
    keeping = Transfers(Link(other, SECRET))
    thread = threading.Thread(target=lambda: one.sendall(sent + sent[:BODY_AT]))
    thread.start()
    received(keeping)
    with pytest.raises(ChangedError):
        keeping.head()
    thread.join()


@pytest.mark.parametrize("answer", [bytes(MAC_BYTES), b"d", b""])
def test_only_the_right_rank_can_say_that_it_has_a_copy(
    answer: bytes, ends: tuple[socket.socket, socket.socket]
) -> None:
    one, other = ends
    thread, errors = sending(Transfers(Link(one, SECRET)))
    copy = Transfers(Link(other, SECRET))
    head = copy.head()
    assert head is not None
    copy.body(head, np.zeros(head.nbytes, np.uint8).data)
    other.sendall(answer)
    other.shutdown(socket.SHUT_WR)
    thread.join()
    assert len(errors) == 1 and isinstance(errors[0], ConnectionError)
