"""The connections of the ring of ranks: handshake, strangers that are in the way, and the addresses on which a rank listens."""

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import stranger
from benchmarks.chaos.attacked import Attacker
from collectives.diagnosis.ring import addresses, handshake, links
from collectives.diagnosis.ring import listener as listening
from collectives.diagnosis.ring.addresses import by_distance
from collectives.diagnosis.ring.handshake import Words
from collectives.diagnosis.ring.links import ListenerPlace, connect
from collectives.diagnosis.ring.listener import Listener

LOOPBACK = ["127.0.0.1"]
WAYS = {"unix": None, "tcp": LOOPBACK}


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_is_made_and_its_end_is_heard(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    listener = Listener(WAYS[way])
    made = connect(listener.place)
    found = listener.close(expected=True)
    assert made is not None and found is not None and list(tmp_path.iterdir()) == []
    assert made.secret == found.secret and len(made.secret) == 32
    with made.socket as one, found.socket as other:
        with pytest.raises(BlockingIOError):
            other.recv(1)
        if way == "tcp":
            assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            # silence is detected after 10 s
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        one.send(b"g")
        one.close()
        other.settimeout(5.0)
        assert (other.recv(1), other.recv(1)) == (b"g", b"")


def test_another_listener_at_the_same_address_is_not_taken_for_the_right_one() -> None:
    """As where two hosts have the same address, each for a bridge of its own."""
    listener, other = Listener(LOOPBACK), Listener(LOOPBACK)
    begun = time.monotonic()
    assert connect(listener.place._replace(addresses=other.place.addresses)) is None
    assert time.monotonic() - begun < 1
    made = connect(listener.place._replace(addresses=other.place.addresses + listener.place.addresses))
    found = listener.close(expected=True)
    assert made is not None and found is not None and made.secret == found.secret
    made.socket.close()
    found.socket.close()
    assert other.close(expected=False) is None


def test_a_rank_that_cannot_be_reached_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        begun = time.monotonic()
        assert connect(ListenerPlace("", (("127.0.0.1", silent.getsockname()[1]),), os.urandom(32))) is None
        assert time.monotonic() - begun < 2
    assert connect(ListenerPlace("\0mpitrain-no-such-name", (), os.urandom(32))) is None
    assert connect(ListenerPlace("/nowhere/mpitrain", (), os.urandom(32))) is None
    assert Listener(None).close(expected=False) is None
    other = Listener(["192.0.2.1"])
    assert other.place.addresses == () and other.close(expected=False) is None, "not an address of this host"


def test_the_last_of_several_connections_counts() -> None:
    """A rank that has given up a connection, because its end came late, makes another one."""
    listener = Listener(LOOPBACK)
    first, second = connect(listener.place), connect(listener.place)
    found = listener.close(expected=True)
    assert first is not None and second is not None and found is not None
    assert found.secret == second.secret != first.secret
    first.socket.settimeout(5.0)
    assert first.socket.recv(1) == b""
    for each in (first, second, found):
        each.socket.close()


# Strangers


@pytest.fixture
def attacker(kind: str) -> Iterator[Attacker]:
    """A process of another user."""
    made = Attacker(kind)
    yield made
    made.close()


@pytest.mark.parametrize("kind", stranger.KINDS)
@pytest.mark.parametrize("way", ["unix", "abstract", "tcp"])
def test_a_stranger_keeps_nobody_out(
    way: str, kind: str, attacker: Attacker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "tcp" and os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path / ("file" if way == "abstract" else ".")))
    listener = Listener(LOOPBACK if way == "tcp" else None)
    assert listener.place.name.startswith("\0") == (way == "abstract")
    (said,) = attacker.replay(listener.place) if kind == "replay" else attacker.attack(listener.place)
    num = 200 if kind == "many" else 1
    made = 0 if way == "unix" else num
    assert f"{kind}: {made} made, {num - made} refused" in said, "a folder of this user alone refuses all"
    begun = time.monotonic()
    link = connect(listener.place)
    assert time.monotonic() - begun < 1
    found = listener.close(expected=True)
    assert link is not None and found is not None and link.secret == found.secret
    found.socket.close()
    link.socket.settimeout(5.0)
    assert link.socket.recv(1) == b"", "the end is heard"
    link.socket.close()


def test_more_connections_than_a_listener_attends_to_do_not_keep_the_right_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_NUM_PENDING", 8)
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.2)
    listener = Listener(LOOPBACK)
    (address,) = listener.place.addresses
    stop, made = threading.Event(), []

    def flood() -> None:
        while not stop.is_set() and len(made) < 500:
            made.append(socket.create_connection(address))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        link = connect(listener.place)
    finally:
        stop.set()
        flooding.join()
    found = listener.close(expected=True)
    assert link is not None and found is not None
    for each in (*made, link.socket, found.socket):
        each.close()


@pytest.mark.parametrize(("limit", "most"), [(128, 16), (resource.RLIM_INFINITY, 256), (16, 8)])
def test_the_listeners_of_a_process_leave_it_the_most_of_its_files(
    limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: at least one connection for each listener."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(listening, "HANDSHAKE_S", 300.0)
    listeners = [Listener(LOOPBACK) for _ in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    made = [
        socket.create_connection(listener.place.addresses[0]) for _ in range(most // 8 + 3) for listener in listeners
    ]
    end = time.monotonic() + 60
    while len(select.select(made, [], [], 0)[0]) < len(made) - most:  # those that were dropped
        assert time.monotonic() < end
        time.sleep(0.01)
    num = len(os.listdir("/proc/self/fd")) - before - len(made)
    assert num <= most + len(listeners), "a listener may have begun with its selector only now"
    for listener in listeners:
        link = connect(listener.place)
        found = listener.close(expected=True)
        assert link is not None and found is not None
        link.socket.close()
        found.socket.close()
    for each in made:
        each.close()


def test_a_message_proves_nothing_in_another_role_or_connection() -> None:
    key, nonce = os.urandom(32), handshake.nonce()
    words = Words(key, nonce, handshake.nonce(), b"10.0.0.1 5|10.0.0.2 6")
    assert handshake.words_of(key, nonce, words.answer(), words.ends) == words
    assert handshake.nonce_of(handshake.hello(nonce)) == nonce
    for other in (
        words._replace(ends=b"10.0.0.1 5|10.0.0.3 6"),
        words._replace(ends=b"10.0.0.2 6|10.0.0.1 5"),
        words._replace(connector=handshake.nonce()),
        words._replace(listener=handshake.nonce()),
        words._replace(key=os.urandom(32)),
    ):
        assert handshake.words_of(key, nonce, words.listener + other.answer()[32:], words.ends) is None
        assert other.proof() != words.proof() and other.secret() != words.secret()
    said = {words.answer()[32:], words.proof(), words.receipt(), words.secret()}
    assert len(said) == 4, "none can be sent back in another role"
    assert handshake.nonce_of(b"") is handshake.nonce_of(b"mpitrain") is handshake.nonce_of(b"x" * 40) is None


# Addresses


def test_addresses_of_this_host_and_their_order() -> None:
    assert "127.0.0.1" in addresses.addresses()
    mine = ["127.0.0.1", "172.17.0.1", "10.77.0.5"]
    theirs = ["127.0.0.1", "172.17.0.1", "192.168.1.4", "fd00::4", "10.77.0.4"]
    assert by_distance(theirs, mine) == ["10.77.0.4", "192.168.1.4", "fd00::4", "127.0.0.1", "172.17.0.1"]


def test_a_system_that_tells_no_addresses_has_a_ring_within_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "if_nameindex", refuse)
    monkeypatch.setattr(addresses, "Path", lambda _: Path("/nowhere"))
    assert addresses.interfaces() == []
    listener = Listener(None)
    made, found = connect(listener.place), listener.close(expected=True)
    assert made is not None and found is not None
    made.socket.close()
    found.socket.close()


def test_a_rank_listens_on_the_address_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.towards(["127.0.0.1"]) == LOOPBACK, "the same host"
    assert addresses.towards(["127.0.0.1", "127.0.0.9"]) == LOOPBACK, "127.0.0.9 is in its network"
    assert addresses.towards([]) == []
    monkeypatch.setattr(addresses, "_source", {"10.1.0.2": "10.1.0.1", "172.17.0.1": "172.17.0.1"}.get)
    monkeypatch.setattr(addresses, "addresses", lambda: ["127.0.0.1", "10.1.0.1", "172.17.0.1"])
    assert addresses.towards(["127.0.0.1", "10.1.0.2", "172.17.0.1", "fd00::2"]) == ["10.1.0.1"]


def test_a_variable_names_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [("lo", "127.0.0.1"), ("ib0", "10.1.0.7"), ("ib0", "fd00::7"), ("eth0", "192.168.1.7")]
    monkeypatch.setattr(addresses, "interfaces", lambda: there)
    for said, expected in {
        "ib0": ["10.1.0.7", "fd00::7"],
        "ib9, eth0": ["192.168.1.7"],
        "10.0.0.0/8": ["10.1.0.7"],
        "10.1.0.7,ib0": ["10.1.0.7", "fd00::7"],
        "fd00::/8": ["fd00::7"],
        "127.0.0.5": ["127.0.0.5"],
        "0.0.0.0": [address for _, address in there],
        "::": [address for _, address in there],
    }.items():
        monkeypatch.setenv("MPITRAIN_LISTEN", said)
        assert addresses.chosen() == expected, said
    wrong = (
        "ib9",
        "10.2.0.0/16",
        "10.1.0.0/33",
        "ib0,",
        ",",
        " ",
        "ib0 eth0",
        "ib0,10.1.0",
        "ib0,10.1.0.7:80",
        "-x",
        "ib0,a/b",
    )
    for said in wrong:
        monkeypatch.setenv("MPITRAIN_LISTEN", said)
        with pytest.raises(
            ValueError, match=r"MPITRAIN_LISTEN is '.*'; expected .* it has lo \(127.0.0.1\), ib0 \(10.1.0.7\)"
        ):
            addresses.chosen()
    monkeypatch.setenv("MPITRAIN_LISTEN", "")
    assert addresses.chosen() is None
