"""A process of another user that attacks the listeners of ranks: `python stranger.py KIND [PLACE ...]`. Standard library only.

A place is the name or path of a unix socket, with @ for a zero byte, or ADDRESS,PORT. Without places it attacks every unix socket of
this library's ranks, and in a network of its own every TCP listener too, as soon as it sees it, until its parent ends. Each attack is
printed: how many connections were made, and how many were refused. All stay open.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import sys
import time
from pathlib import Path

KINDS = ("first", "many", "half", "replay", "length")
"""Connect first and say nothing; the same 200 times; send half a hello; send what a rank has sent to a listener before; send 2^63 as
each length."""
RECORDED = "MPITRAIN_CHAOS_RECORDED"
"""A file with a hello and a proof that a rank has sent."""
NOBODY = 65534
_NUM_MANY = 200
_HELLO_BYTES = 40  # of collectives.diagnosis.ring.handshake

Target = str | tuple[str, int]


def main(words: list[str]) -> None:
    """Attack the places, or all that come."""
    kind, places = words[0], [_target(word) for word in words[1:]]
    own = os.getppid()
    become_stranger()
    held: list[socket.socket] = []
    if places:
        for place in places:
            attack(kind, place, held)
        sys.stdin.read()
        return
    done: set[Target] = set()
    while os.getppid() == own:
        there = targets()
        for target in there - done:
            if kind != "replay" or recorded():
                done.add(target)
                attack(kind, target, held)
        done &= there
        time.sleep(0.001)


def become_stranger() -> None:
    """Become another user, if this process may. It ends with its parent."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG; a change of the user resets it


def attack(kind: str, target: Target, held: list[socket.socket]) -> None:
    """Attack one listener, and print what came of it."""
    made = refused = 0
    for _ in range(_NUM_MANY if kind == "many" else 1):
        try:
            held.append(_connected(target))
            made += 1
        except OSError:
            refused += 1
            continue
        with contextlib.suppress(OSError):
            _say(kind, held[-1])
    print(f"stranger {os.geteuid()}: {kind}: {made} made, {refused} refused at {target}", flush=True)


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


def _say(kind: str, connection: socket.socket) -> None:
    if kind == "half":
        connection.sendall(b"mpitrain".ljust(_HELLO_BYTES // 2, b"x"))
    elif kind == "replay":
        connection.sendall(recorded()[:_HELLO_BYTES])
        connection.recv(4096)
        connection.sendall(recorded()[_HELLO_BYTES:])
    elif kind == "length":
        connection.sendall(struct.pack("<3Q", *[1 << 63] * 3) * 4)


def recorded() -> bytes:
    """What a rank has sent to a listener; empty before."""
    try:
        return Path(os.environ[RECORDED]).read_bytes()
    except (KeyError, OSError):
        return b""


def targets() -> set[Target]:
    """The listeners of ranks that this process can see."""
    found: set[Target] = set()
    for line in _lines("/proc/net/unix"):
        if (match := re.search(r"(\S*mpitrain-\d+-[0-9a-f]{32}\S*)$", line)) and line.split()[3] == "00010000":
            found.add(match[1].replace("@", "\0", 1) if match[1].startswith("@") else match[1])
    if not _has_own_network():
        return found
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in _lines(f"/proc/net/{name}"):
            if (fields := line.split())[3:4] == ["0A"]:  # it listens
                digits, _, port = fields[1].partition(":")
                raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def _has_own_network() -> bool:
    """Whether this process is on a host of ./mpirun/cluster: elsewhere there are listeners of others."""
    return re.fullmatch(r"host\d+", socket.gethostname()) is not None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _target(word: str) -> Target:
    address, comma, port = word.rpartition(",")
    return (address, int(port)) if comma else word.replace("@", "\0", 1) if word.startswith("@") else word


if __name__ == "__main__":
    main(sys.argv[1:])
