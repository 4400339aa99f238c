"""The names of shards without the secrets of their addresses. Checkpoints have them, and the keys of documents begin with them.

    https://u:p@host/a.tar?X-Amz-Signature=1     https://***@host/a.tar?X-Amz-Signature=***
    https://host/get?blob=a                      https://host/get?blob=***&mark=6b1d0f7a92c4, if there is a second blob
    s3://bucket/part#1, and files                as they are

A name is the same in each launch, also if a signature is made anew. A mark is a hash of the parameters that are hidden, but for
passwords and signatures, and only names that would be the same have one.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from collectives.texts import HIDDEN, identity_of, without_secrets

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


def places(names: Sequence[str], sizes: Iterable[int], now: Mapping[str, int], sizes_now: Sequence[int]) -> list[int]:
    """The places of the shards of a checkpoint in a list; -1 for one that is not there.

    A name may have got a mark because a shard was added, or another one because a signature of an unknown kind was made anew. Then the
    rest of the name and the size tell the shard, if no other one has both.

    Args:
        names, sizes: of the checkpoint.
        now: the place of each name in the list.
        sizes_now: of the shards in the list.
    """
    found = [now.get(name, -1) for name in names]
    if -1 not in found:
        return found
    free = defaultdict[tuple[str, int], list[int]](list)
    taken = set(found)
    for name, place in now.items():
        if place not in taken and HIDDEN in name:
            free[_MARK.sub("", name), int(sizes_now[place])].append(place)
    lost = defaultdict[tuple[str, int], list[int]](list)
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if found[index] < 0:
            lost[_MARK.sub("", name), int(size)].append(index)
    for key, indices in lost.items():
        if len(indices) == len(free.get(key, ())) == 1:
            found[indices[0]] = free[key][0]
    return found


def _marked(name: str, identity: str) -> str:
    """The name with a hash in it, in the form of a parameter that is no secret."""
    mark = hashlib.blake2b(
        identity.encode(errors="surrogateescape"), digest_size=6, person=b"mpitrain.shard"
    ).hexdigest()
    path, fragment = (name.removesuffix(f"#{HIDDEN}"), f"#{HIDDEN}") if name.endswith(f"#{HIDDEN}") else (name, "")
    return f"{path}{'&' if '?' in path else '?'}mark={mark}{fragment}"
