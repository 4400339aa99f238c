"""The addresses of this host: on which ones it listens for a rank of another host, and in which order it tries another host's.

A host may have addresses that other hosts cannot reach, or that another host has too (bridges of containers). A rank listens on the
addresses that the system would use to reach the other host, and nowhere else: not on the interfaces of other networks.
MPITRAIN_LISTEN names other ones.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1
_GLOBAL_SCOPE = "00"  # of an address in /proc/net/if_inet6
_ANY_PORT = 9  # nothing is sent to it
_VARIABLE = "MPITRAIN_LISTEN"


def interfaces() -> list[tuple[str, str]]:
    """The interfaces of this host that are up, each with an address of it. Empty if the system does not tell."""
    found: list[tuple[str, str]] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an IPv4 address
                (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
                if flags & _IFF_UP:
                    address = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
                    found.append((name, address))
    with suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def addresses() -> list[str]:
    """The addresses of this host."""
    return [address for _, address in interfaces()]


def chosen() -> list[str] | None:
    """The addresses of this host that MPITRAIN_LISTEN names; None if it is unset or empty. ValueError if it names none.

    It has one or more words, with commas between them: an interface (`ib0`), an address of this host, a network (`10.1.0.0/16`); or
    `0.0.0.0` or `::` for all addresses.
    """
    said = os.environ.get(_VARIABLE, "")
    if not said:
        return None
    there = interfaces()
    words = [word.strip() for word in said.split(",")]
    found = [address for word in words for address in _named(word, there)]
    if not found or not all(map(_is_word, words)):
        shown = ", ".join(f"{name} ({address})" for name, address in there)
        raise ValueError(
            f"{_VARIABLE} is {said!r}; expected interfaces, addresses or networks of this host, {socket.gethostname()}, such as "
            f"10.1.0.0/16, with commas between them: it has {shown}"
        )
    return list(dict.fromkeys(found))


def _is_word(word: str) -> bool:
    """Whether it may be the name of an interface, perhaps of another host, or is an address or a network."""
    with suppress(ValueError):
        ipaddress.ip_network(word, strict=False)
        return True
    return re.fullmatch(r"(?![\d.]+$)[^\s/:,]{1,15}", word) is not None


def _named(word: str, there: Sequence[tuple[str, str]]) -> list[str]:
    """The addresses that a word names; none if it is no word for addresses, or for those of other hosts."""
    if by_name := [address for name, address in there if name == word]:
        return by_name
    with suppress(ValueError):
        network = ipaddress.ip_network(word, strict=False)
        if network.num_addresses == 1:
            address = str(network.network_address)
            if network.network_address.is_unspecified:
                return [address for _, address in there]
            return [address] * _is_own(address)
        return [address for _, address in there if ipaddress.ip_address(address) in network]
    return []


def _is_own(address: str) -> bool:
    """Whether it is an address of this host, also one that `interfaces` leaves out: an interface may have several."""
    with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as any_socket:
        any_socket.bind((address, 0))
        return True
    return False


def towards(theirs: Sequence[str]) -> list[str]:
    """The addresses of this host from which it would reach another host, which has the addresses `theirs`."""
    mine = addresses()
    own = set(mine)
    others = [address for address in theirs if address not in own]
    # Without others they are the same host, or one with the same bridges and nothing else.
    found = [_source(address) for address in by_distance(others or theirs, mine)]
    return list(dict.fromkeys(filter(None, found)))


def _source(address: str) -> str | None:
    """The address that the system gives to what it sends to another address; None if there is no way."""
    with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((address, _ANY_PORT))  # sends nothing
        return str(any_socket.getsockname()[0]).partition("%")[0]
    return None


def family_of(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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
