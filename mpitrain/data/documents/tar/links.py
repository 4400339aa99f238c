"""Links in tar files. A link leads to an entry of its own tar file, or nowhere: no file of the machine is ever opened."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_MOST_HOPS, _MOST_BYTES = 40, 4096  # as Linux
_MOST_PARTS = 4096  # of the paths of all hops together


class Link(NamedTuple):
    """A hard link leads to the entry with the name `target`. The target of a symbolic one begins in the folder of the link."""

    is_symbolic: bool
    target: bytes


class _DeadEndError(Exception):
    """Why a link leads nowhere: the end of a sentence about the link."""


def resolved(
    names: Sequence[bytes], links: Mapping[int, Link], folders: Iterable[bytes]
) -> dict[int, int | str | None]:
    """Where links lead to: the index of an entry that is no link, None for a folder, or why it is nowhere.

    `names`: of all entries. `links`: by their index. `folders`: the names of the entries that are folders.
    """
    plain = [plain_name(name) for name in names]
    by_name = {name: index for index, name in enumerate(plain) if not names[index].endswith(b"/")}  # else an old folder
    symbolic = {plain[index]: link.target for index, link in links.items() if link.is_symbolic}
    old_folders = (name for name in names if name.endswith(b"/"))
    inside = sorted([*plain, *(plain_name(name) + b"/" for name in (*folders, *old_folders))])

    def end_of(index: int) -> int | None:
        for _ in range(_MOST_HOPS):
            if (link := links.get(index)) is None:
                return index
            folder = plain[index].rpartition(b"/")[0] + b"/" if link.is_symbolic else b""
            if not link.target or (link.is_symbolic and link.target.startswith(b"/")):
                raise _DeadEndError("which is not in this tar file")
            path = _followed(folder + link.target, symbolic)
            if path not in by_name:
                first = inside[min(bisect_left(inside, path + b"/"), len(inside) - 1)]
                if not path or first.startswith(path + b"/"):
                    return None
                raise _DeadEndError("which is not in this tar file")
            index = by_name[path]
        raise _DeadEndError("and so on in a circle")

    found: dict[int, int | str | None] = {}
    for index, link in links.items():
        try:
            found[index] = end_of(index)
        except _DeadEndError as error:
            name, target = (each[:200].decode(errors="replace") for each in (names[index], link.target))
            found[index] = f"the link {name!r} leads to {target!r}, {error}"
    return found


def plain_name(name: bytes) -> bytes:
    """A name without what does not matter: `./a//b` is `a/b`."""
    if name.startswith(b"./"):
        name = name[2:]
    if b"./" not in name and b"//" not in name and name[:1] != b"/" and name[-1:] != b"/":
        return name
    return b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))


def _followed(path: bytes, symbolic: Mapping[bytes, bytes]) -> bytes:
    """A path without `..` and without symbolic links, as realpath gives it. `symbolic`: their targets, by plain names."""
    left, done = _parts(path), list[bytes]()
    num_hops = num_parts = 0
    while left:
        part = left.pop()
        num_parts += 1
        if num_parts > _MOST_PARTS or num_hops > _MOST_HOPS:
            raise _DeadEndError("and so on in a circle")
        if part == b"..":
            if not done:
                raise _DeadEndError("which is not in this tar file")
            done.pop()
        elif part not in (b"", b"."):
            done.append(part)
            if target := symbolic.get(b"/".join(done)):
                if target.startswith(b"/"):
                    raise _DeadEndError("which is not in this tar file")
                num_hops += 1
                done.pop()
                left += _parts(target)
    return b"/".join(done)


def _parts(path: bytes) -> list[bytes]:
    """The names in a path, the last one first."""
    if len(path) > _MOST_BYTES:
        raise _DeadEndError("a path that is too long")
    return path.split(b"/")[::-1]
