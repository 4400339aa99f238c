"""One connection to a rank of another node, over which copies go. Nobody on the way can change, repeat or reorder them unnoticed.

    sender    -> receiver    3 numbers of 8 bytes: generation, bytes of the header, bytes of the data; their MAC
                             the header, the data; the MAC of all this
    receiver  -> sender      a MAC: it has the copy

A MAC is BLAKE2b with the secret of the connection as its key (RFC 7693), over the number of the transfer and what was sent. It is the
fastest one of Python's library on CPUs without instructions for SHA. The lengths are believed, and memory is reserved, only after their
MAC. A copy counts only after the last MAC.
"""

import hashlib
import hmac
import struct
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from collectives.diagnosis.ring.links import Link

_HEAD = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")
_MAC_BYTES = 32
_PIECE_BYTES = 1 << 20  # of which the MAC is computed while the next one is sent or received
_HEAD_MAC, _BODY_MAC, _DONE_MAC = b"copy head", b"copy", b"copy kept"


class Head(NamedTuple):
    """The first numbers of a transfer."""

    generation: int
    header_bytes: int
    nbytes: int


class Transfers:
    """One side of a connection. OSError if the connection ends, or the other side is not the one with which it was made."""

    def __init__(self, link: Link) -> None:
        self.socket, self._secret = link.socket, link.secret
        self._number = 0

    def send(self, generation: int, header: bytes, data: Any) -> None:
        """Send a copy, and wait until the other side has it. `data`: a buffer."""
        head = _HEAD.pack(generation, len(header), len(data))
        self.socket.sendall(head + self._mac(_HEAD_MAC, head).digest())
        with _Hashing(self._mac(_BODY_MAC, head)) as hashing:
            for piece in _pieces(header, data):
                self.socket.sendall(piece)
                hashing.add(piece)
        self.socket.sendall(hashing.mac.digest())
        self._check(self._mac(_DONE_MAC, b""))
        self._number += 1

    def head(self) -> Head | None:
        """Wait for the next copy; None if the other side has ended."""
        if not (data := self._received(bytearray(_HEAD.size))):
            return None
        self._check(self._mac(_HEAD_MAC, data))
        return Head(*_HEAD.unpack(data))

    def body(self, head: Head, data: memoryview) -> bytes:
        """Receive the copy after `head`: its data into `data`; returns its header."""
        header = bytearray(head.header_bytes)
        with _Hashing(self._mac(_BODY_MAC, _HEAD.pack(*head))) as hashing:
            for piece in _pieces(header, data):
                if len(self._received(piece)) < len(piece):
                    raise ConnectionResetError("the rank that sends a copy has ended")
                hashing.add(piece)
        self._check(hashing.mac)
        return bytes(header)

    def answer(self) -> None:
        """Tell the other side that the copy is here."""
        self.socket.sendall(self._mac(_DONE_MAC, b"").digest())
        self._number += 1

    def _mac(self, what: bytes, begin: bytes | memoryview) -> "hashlib.blake2b":
        mac = hashlib.blake2b(digest_size=_MAC_BYTES, key=self._secret, person=what)
        mac.update(_NUMBER.pack(self._number))
        mac.update(begin)
        return mac

    def _check(self, expected: "hashlib.blake2b") -> None:
        """Receive a MAC. ConnectionError unless it is the expected one."""
        said = self._received(bytearray(_MAC_BYTES))
        if len(said) < _MAC_BYTES:
            raise ConnectionResetError("the rank on the other side of a transfer of copies has ended")
        if not hmac.compare_digest(said, expected.digest()):
            raise ChangedError(
                "a copy of the state was changed on its way to another host: expected its MAC, got another one"
            )

    def _received(self, into: bytearray | memoryview) -> memoryview:
        """Fill `into` from the connection; returns the part that was filled before its end."""
        view, at = memoryview(into), 0
        while at < len(view) and (count := self.socket.recv_into(view[at:])):
            at += count
        return view[:at]


def _pieces(*parts: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        yield from (view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES))


class _Hashing:
    """Adds parts to a MAC in a thread of its own, so that the connection need not wait for it. The MAC is whole after the block."""

    def __init__(self, mac: "hashlib.blake2b") -> None:
        self.mac = mac
        self._parts: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpitrain-copies-mac", daemon=True)
        self.add = self._parts.put

    def __enter__(self) -> "_Hashing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            self.mac.update(part)  # without the GIL


class ChangedError(ConnectionError):
    """What came is not what the right rank has sent."""
