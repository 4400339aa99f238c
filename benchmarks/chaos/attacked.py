"""The main job, of which each connection between ranks is attacked: `python -m benchmarks.chaos.attacked`, with `python -m mpitrain`'s
arguments.

    MPITRAIN_CHAOS_ATTACK    KIND of benchmarks.chaos.stranger

Each rank starts a process of another user. It learns of each listener of the rank before the other ranks do. What it replays is what
the rank itself has just sent to another rank, for a connection that it gives up.
"""

import os
import runpy
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos import stranger
from collectives.diagnosis.ring import handshake, joining
from collectives.diagnosis.ring.handshake import Words
from collectives.diagnosis.ring.links import Link, ListenerPlace, connect
from collectives.diagnosis.ring.listener import Listener
from collectives.launcher import environment_of_program

ATTACK = "MPITRAIN_CHAOS_ATTACK"
"""The environment variable with the kind of attack."""
_ANSWER_S = 5.0


class Attacker:
    """The process of another user."""

    def __init__(self, kind: str) -> None:
        # Its folders may be closed to it, so it gets its program as text.
        command = [sys.executable, "-I", "-S", "-c", Path(stranger.__file__).read_text(), kind]
        self._process = subprocess.Popen(
            command, env=environment_of_program(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def attack(self, place: ListenerPlace, sent: bytes = b"") -> list[str]:
        """Attack a listener; returns what the process says of each of its sockets. `sent`: to be replayed."""
        targets = [f"{address},{port}" for address, port in place.addresses] + [place.name] * bool(place.name)
        return [self._attack(f"{target} {sent.hex()}".replace("\0", "@")) for target in targets]

    def _attack(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            return f"stranger: no answer within {_ANSWER_S} s"
        return self._process.stdout.readline().decode().strip()

    def replay(self, place: ListenerPlace) -> list[str]:
        """Make a connection and give it up. Then send what this process has sent for it to the same listener."""
        return self.attack(place, record(place))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def record(place: ListenerPlace) -> bytes:
    """What this process sends to a listener for a connection, which it then gives up. Empty if there is no connection."""
    sent: list[bytes] = []
    here = threading.get_ident()

    def recording(call: Callable[..., bytes]) -> Any:
        def said(*args: Any) -> bytes:
            data = call(*args)
            if threading.get_ident() == here:  # a listener of this process computes the proof of another rank
                sent.append(data)
            return data

        return said

    hello, proof = handshake.hello, Words.proof
    handshake.hello, Words.proof = recording(hello), recording(proof)  # type: ignore[method-assign]
    try:
        link = connect(place)
    finally:
        handshake.hello, Words.proof = hello, proof  # type: ignore[method-assign]
    if link is not None:
        link.socket.close()
    return b"".join(sent)


def _attack_all(kind: str) -> None:
    """Attack all listeners that this process makes from now on."""
    attacker = Attacker(kind)

    class Attacked(Listener):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if kind != "replay":
                print(*attacker.attack(self.place), sep="\n", flush=True)

    def replayed(place: ListenerPlace) -> Link | None:
        if kind == "replay":
            print(*attacker.replay(place), sep="\n", flush=True)
        return connect(place)

    vars(joining).update(Listener=Attacked, connect=replayed)


if __name__ == "__main__":
    _attack_all(os.environ[ATTACK])
    runpy.run_module("mpitrain", run_name="__main__", alter_sys=True)
