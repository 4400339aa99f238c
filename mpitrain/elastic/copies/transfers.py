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
from typing import Any, NamedTuple

from collectives.diagnosis.ring.links import Link

_HEAD = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")
_MAC_BYTES = 32
_PIECE_BYTES = 1 << 18  # between two parts of the MAC: the kernel sends or receives meanwhile
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
        mac = self._mac(_BODY_MAC, head)
        for view in (memoryview(header), memoryview(data)):
            for at in range(0, len(view), _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                self.socket.sendall(piece)
                mac.update(piece)
        self.socket.sendall(mac.digest())
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
        mac = self._mac(_BODY_MAC, _HEAD.pack(*head))
        header = bytearray(head.header_bytes)
        for each in (memoryview(header), data):
            if len(self._received(each, mac)) < len(each):
                raise ConnectionResetError("the rank that sends a copy has ended")
        self._check(mac)
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

    def _received(self, into: bytearray | memoryview, mac: Any = None) -> memoryview:
        """Fill `into` from the connection; returns the part that was filled before its end."""
        view, at = memoryview(into), 0
        while at < len(view) and (count := self.socket.recv_into(view[at : at + _PIECE_BYTES])):
            if mac is not None:
                mac.update(view[at : at + count])
            at += count
        return view[:at]


class ChangedError(ConnectionError):
    """What came is not what the right rank has sent."""
