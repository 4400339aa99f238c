"""The names of shards without the secrets of their addresses. Checkpoints have them, and the keys of documents begin with them.

    https://u:p@host/a.tar?X-Amz-Signature=1     https://***@host/a.tar?X-Amz-Signature=***
    https://host/get?blob=a                      https://host/get?blob=***&mark=6b1d0f7a92c4, if there is a second blob
    s3://bucket/part#1, and files                as they are

A name is the same in each launch, also if a signature is made anew. A mark is a hash of the parameters that are hidden, but for
passwords and signatures. Only names that would be the same have one in them, but a checkpoint keeps those of all: they tell whether an
address is still of the same file.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from collectives.addresses import identity_of
from collectives.secret_forms import HIDDEN
from collectives.texts import without_secrets

_MARK = re.compile(r"[?&]mark=[0-9a-f]{12}(?=#|$)")


def shard_names(paths: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """The names of paths or URLs, which differ. `sizes`: in bytes.

    ValueError for addresses that differ in user, password or signature alone, and are of files of one size: mostly it is one file.
    """
    same_name = defaultdict[str, list[int]](list)
    for index, path in enumerate(paths):
        same_name[without_secrets(path) if "://" in path else path].append(index)
    names = list(paths)
    for name, indices in same_name.items():
        if len(indices) == 1:
            names[indices[0]] = name
            continue
        same_file = defaultdict[str, list[int]](list)
        for index in indices:
            same_file[identity_of(paths[index])].append(index)
        for identity, its in same_file.items():
            if len({sizes[index] for index in its}) < len(its):
                raise ValueError(
                    f"data: {name} comes {len(its)} times, with addresses that differ in user, password or signature alone; expected "
                    "one address of each file: leave out the others, or add a parameter such as &part=1 to those of other files"
                )
            for index in its:
                names[index] = _marked(name, f"{identity}\0{sizes[index]}" if len(its) > 1 else identity)
    return names


def shard_marks(paths: Sequence[str], names: Sequence[str]) -> list[str]:
    """The marks of paths or URLs with these `names`, of `shard_names`: hashes; "" for a name that hides only users and signatures.

    It is "" as well for a URL in which something is hidden already.
    """
    return ["" if name == path else _mark_of(path) for name, path in zip(names, paths, strict=True)]


class Known(NamedTuple):
    """Shards, by all that is known of their files: their names in a list, sizes in bytes, and marks, "" if one is not known."""

    names: Sequence[str]
    sizes: Sequence[int]
    marks: Sequence[str]


class FoundShards(NamedTuple):
    """The places of the shards of a checkpoint in a list; -1 for one that is not there.

    `unsure`: the numbers of those that are found by name and size alone.
    """

    places: list[int]
    unsure: list[int]


def found_again(before: Known, now: Known) -> FoundShards:
    """Find the shards of a checkpoint, `before`, in a list.

    A name may have got a mark because a shard was added. Or a mark has changed because a signature of an unknown kind was made anew:
    then name and size tell the shard, if no other one has both. But if a shard with the same name otherwise has kept its mark, no
    signature was made anew, and one with another mark is another file.
    """
    found = FoundShards([], [])
    place_of = {name: place for place, name in enumerate(now.names)}
    for index, (name, mark) in enumerate(zip(before.names, before.marks, strict=True)):
        place = place_of.get(name, -1)
        if place >= 0 and now.marks[place] != mark and not _MARK.search(name):
            if mark:
                place = -1
            else:
                found.unsure.append(index)
        found.places.append(place)
    if -1 in found.places:
        _find_others(before, now, found)
    return found


def _find_others(before: Known, now: Known, found: FoundShards) -> None:
    """Find the shards that have another name, or another mark, in the list."""
    taken = set(found.places)
    by_mark, by_size = defaultdict[tuple[str, str], list[int]](list), defaultdict[tuple[str, int], list[int]](list)
    for place, (name, size, mark) in enumerate(zip(*now, strict=True)):
        if place not in taken and (mark or HIDDEN in name):
            by_mark[_stem(name), mark or _mark_in(name)].append(place)
            by_size[_stem(name), int(size)].append(place)
    lost = [index for index, place in enumerate(found.places) if place < 0]
    for index in lost:
        name, size, mark = before.names[index], before.sizes[index], before.marks[index]
        its = by_mark.get((_stem(name), mark or _mark_in(name)), []) if mark or _mark_in(name) else []
        equal = [place for place in its if now.sizes[place] == size] or its
        if len(equal) == 1:
            found.places[index] = equal[0]
    unsure, taken = set(found.unsure), set(found.places)
    certain = {_stem(before.names[i]) for i, place in enumerate(found.places) if place >= 0 and i not in unsure}
    alike = defaultdict[tuple[str, int], list[int]](list)
    for index in lost:
        if found.places[index] < 0:
            alike[_stem(before.names[index]), int(before.sizes[index])].append(index)
    for key, indices in alike.items():
        free = [place for place in by_size.get(key, ()) if place not in taken]
        if len(indices) != 1 or len(free) != 1:
            continue
        (index,) = indices
        if key[0] in certain and (before.marks[index] or _mark_in(before.names[index])):
            continue
        found.places[index] = free[0]
        found.unsure.append(index)


def _stem(name: str) -> str:
    """A name without its mark."""
    return _MARK.sub("", name)


def _mark_in(name: str) -> str:
    """The mark in a name, or ""."""
    its = _MARK.search(name)
    return its[0].rpartition("=")[2] if its else ""


def _mark_of(address: str) -> str:
    identity = identity_of(address)
    plain = identity.replace("\0\0", "?", 1).replace("\0", "&")
    return "" if HIDDEN in address or without_secrets(plain) == plain else _hash(identity)


def _marked(name: str, identity: str) -> str:
    """The name with a hash in it, in the form of a parameter that is no secret."""
    path, fragment = (name.removesuffix(f"#{HIDDEN}"), f"#{HIDDEN}") if name.endswith(f"#{HIDDEN}") else (name, "")
    return f"{path}{'&' if '?' in path else '?'}mark={_hash(identity)}{fragment}"


def _hash(identity: str) -> str:
    data = identity.encode(errors="surrogateescape")
    return hashlib.blake2b(data, digest_size=6, person=b"mpitrain.shard").hexdigest()
