"""A process of another user that attacks the listeners of ranks: `python stranger.py KIND`. Standard library only.

It reads places from standard input, one a line: the name or path of a unix socket, with @ for a zero byte at its beginning, or
ADDRESS,PORT; and to be replayed, behind a blank and in hexadecimal digits, the hello and the proof that a rank has sent. It attacks
each place, and prints how many connections were made, and how many were refused. All stay open until the input ends.
"""

import contextlib
import os
import socket
import struct
import sys

KINDS = ("first", "many", "half", "replay", "length")
"""Connect first and say nothing; the same 200 times; send half a hello; send what a rank has sent to a listener before; send 2^63 as
each length."""
_NOBODY = 65534
_NUM_MANY = 200
_HELLO_BYTES = 40  # of collectives.diagnosis.ring.handshake

Target = str | tuple[str, int]


def main(kind: str) -> None:
    """Attack the places."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a name space has no other user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    held: list[socket.socket] = []
    for line in sys.stdin:
        place, _, sent = line.strip().partition(" ")
        made, refused = attack(kind, _target(place), bytes.fromhex(sent), held)
        print(f"stranger: user {os.geteuid()}, {kind}: {made} made, {refused} refused at {place}", flush=True)


def attack(kind: str, target: Target, sent: bytes, held: list[socket.socket]) -> tuple[int, int]:
    """Attack one listener; returns the number of connections that were made, and of those that were refused."""
    made = refused = 0
    for _ in range(_NUM_MANY if kind == "many" else 1):
        try:
            held.append(_connected(target))
            made += 1
        except OSError:
            refused += 1
            continue
        with contextlib.suppress(OSError):
            _say(kind, sent, held[-1])
    return made, refused


def _connected(target: Target) -> socket.socket:
    family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    connection = socket.socket(family)
    connection.settimeout(0.5)
    try:
        connection.connect(target)
    except OSError:
        connection.close()
        raise
    return connection


def _say(kind: str, sent: bytes, connection: socket.socket) -> None:
    if kind == "half":
        connection.sendall(b"mpitrain".ljust(_HELLO_BYTES // 2, b"x"))
    elif kind == "replay":
        connection.sendall(sent[:_HELLO_BYTES])
        connection.recv(4096)
        connection.sendall(sent[_HELLO_BYTES:])
    elif kind == "length":
        connection.sendall(struct.pack("<3Q", *[1 << 63] * 3) * 4)


def _target(word: str) -> Target:
    address, comma, port = word.rpartition(",")
    return (address, int(port)) if comma else word.replace("@", "\0", 1) if word.startswith("@") else word


if __name__ == "__main__":
    main(sys.argv[1])
