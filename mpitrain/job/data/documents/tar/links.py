"""Links in tar files. A link leads to an entry of its own tar file, or nowhere: no file of the machine is ever opened."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_MOST_HOPS, _MOST_BYTES = 40, 4096  # as Linux
_WORK_OF_PART = 64  # of a name in a path, in bytes that are copied
_WORK, _WORK_OF_LINK = 1 << 26, 1 << 14
"""Of all links, and for each: a second, and 50 us. Links of honest files take a tenth."""


class TarLink(NamedTuple):
    """A hard link leads to the entry with the name `target`. The target of a symbolic one begins in the folder of the link."""

    is_symbolic: bool
    target: bytes


class _DeadEndError(Exception):
    """Why a link leads nowhere: the end of a sentence about the link."""


def resolved(
    names: Sequence[bytes], links: Mapping[int, TarLink], folders: Iterable[bytes]
) -> dict[int, int | str | None]:
    """Where links lead to: the index of an entry that is no link, None for a folder, or why it is nowhere.

    `names`: of all entries. `links`: by their index. `folders`: the names of the entries that are folders.
    """
    plain = [plain_name(name) for name in names]
    by_name = {name: index for index, name in enumerate(plain) if not names[index].endswith(b"/")}  # else an old folder
    symbolic = {plain[index]: link.target for index, link in links.items() if link.is_symbolic}
    walk = _Walk(symbolic, _WORK + _WORK_OF_LINK * len(links))
    old_folders = (name for name in names if name.endswith(b"/"))
    inside = sorted([*plain, *(plain_name(name) + b"/" for name in (*folders, *old_folders))])

    def end_of(index: int) -> int | None:
        walk.num_hops = 0
        while (link := links.get(index)) is not None:
            walk.hop()
            folder = plain[index].rpartition(b"/")[0] + b"/" if link.is_symbolic else b""
            if not link.target or (link.is_symbolic and link.target.startswith(b"/")):
                raise _DeadEndError("which is not in this tar file")
            path = walk.end(folder + link.target)
            if path not in by_name:
                first = inside[min(bisect_left(inside, path + b"/"), len(inside) - 1)]
                if not path or first.startswith(path + b"/"):
                    return None
                raise _DeadEndError("which is not in this tar file")
            index = by_name[path]
        return index

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


class _Walk:
    """Follows paths as realpath does. `symbolic`: the targets of symbolic links, by plain names. `work`: how much it may do in all."""

    def __init__(self, symbolic: Mapping[bytes, bytes], work: int) -> None:
        self._symbolic, self._work = symbolic, work
        self.num_hops = 0
        """Over links, since somebody has set it to 0."""

    def hop(self) -> None:
        """Count one more link. _DeadEndError for the 41st one."""
        self.num_hops += 1
        if self.num_hops > _MOST_HOPS:
            raise _DeadEndError("and so on in a circle, or over too many links")

    def end(self, path: bytes) -> bytes:
        """The path without `..` and without symbolic links. _DeadEndError if it leads out of the tar file, or takes too much work."""
        left, done = self._parts(path), b""
        while left:
            self._work -= _WORK_OF_PART + len(done)
            if self._work < 0:
                raise _DeadEndError("and the links of this tar file are too long to follow all")
            part = left.pop()
            if part == b"..":
                if not done:
                    raise _DeadEndError("which is not in this tar file")
                done = done.rpartition(b"/")[0]
            elif part not in (b"", b"."):
                inside = done + b"/" + part if done else part
                if not (target := self._symbolic.get(inside)):
                    done = inside
                    continue
                if target.startswith(b"/"):
                    raise _DeadEndError("which is not in this tar file")
                self.hop()
                left += self._parts(target)
        return done

    def _parts(self, path: bytes) -> list[bytes]:
        """The names in a path, the last one first."""
        if len(path) > _MOST_BYTES:
            raise _DeadEndError("a path that is too long")
        self._work -= len(path)
        return path.split(b"/")[::-1]
