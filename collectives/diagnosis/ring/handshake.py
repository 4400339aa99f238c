"""The handshake of two ranks that make a connection: each proves that it knows the listener's key, which is never sent.

    connector  -> listener    "mpitrain" and a nonce
    listener   -> connector   its own nonce, and its proof
    connector  -> listener    its proof
    listener   -> connector   its receipt: it has taken this connection, in place of any earlier one

A key is random, one for each listener, and goes to the other ranks by MPI alone. A proof is an HMAC-SHA256 over the role, both nonces
and both ends of the connection, so that a recorded message, a message sent back, and one that was passed on by a third host prove
nothing. All messages have a fixed length. A stranger learns nothing from the answer to a hello but a nonce.
"""

import hmac
import secrets
import socket
from typing import NamedTuple

KEY_BYTES = 32
_MAGIC = b"mpitrain"
_NONCE_BYTES = _PROOF_BYTES = 32
HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
ANSWER_BYTES = _NONCE_BYTES + _PROOF_BYTES
PROOF_BYTES = RECEIPT_BYTES = _PROOF_BYTES


def nonce() -> bytes:
    """A new random number."""
    return secrets.token_bytes(_NONCE_BYTES)


def hello(its_nonce: bytes) -> bytes:
    """The first message."""
    return _MAGIC + its_nonce


def nonce_of(message: bytes) -> bytes | None:
    """The nonce of a hello; None if it is none."""
    return message[len(_MAGIC) :] if message.startswith(_MAGIC) and len(message) == HELLO_BYTES else None


class Words(NamedTuple):
    """What both sides of one connection can say, if they know the key."""

    key: bytes
    connector: bytes  # its nonce
    listener: bytes
    ends: bytes

    def _tag(self, role: bytes) -> bytes:
        # The parts before `ends` have fixed lengths but the role, which no other role begins with.
        return hmac.digest(self.key, role + b"\0" + self.connector + self.listener + self.ends, "sha256")

    def answer(self) -> bytes:
        """The listener's nonce and proof."""
        return self.listener + self._tag(b"listener")

    def proof(self) -> bytes:
        """The connector's proof."""
        return self._tag(b"connector")

    def receipt(self) -> bytes:
        """The listener's last message."""
        return self._tag(b"receipt")

    def secret(self) -> bytes:
        """A key of this connection alone, for what is sent over it later."""
        return self._tag(b"secret")


def words_of(key: bytes, its_nonce: bytes, answer: bytes, ends: bytes) -> Words | None:
    """The words of a connection whose listener has answered; None if the answer does not prove that it knows the key."""
    words = Words(key, its_nonce, answer[:_NONCE_BYTES], ends)
    return words if is_same(answer, words.answer()) else None


def is_same(one: bytes, other: bytes) -> bool:
    """Whether two messages are equal. The time that this takes says nothing of the place where they differ."""
    return hmac.compare_digest(one, other)


def ends_of(connection: socket.socket, *, of_connector: bool) -> bytes:
    """Both ends of a TCP connection, the connector's first. A unix socket, whose other side the kernel names, has none."""
    if connection.family == socket.AF_UNIX:
        return b""
    own, other = connection.getsockname(), connection.getpeername()
    return "|".join(map(_end, (own, other) if of_connector else (other, own))).encode()


def _end(address: tuple[str, int]) -> str:
    return f"{address[0].partition('%')[0].removeprefix('::ffff:')} {address[1]}"
