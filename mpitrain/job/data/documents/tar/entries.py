"""The files of a tar file: their names, and where their bytes are.

Hidden files, with names that begin with a dot, are left out, as in WebDataset: macOS puts a file ._0001.txt beside 0001.txt. So are
folders, devices and pipes. `remark` names what is left out, except for folders and the files of macOS.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.job.data.documents.reading import DamagedShardError, MappedFile
from mpitrain.job.data.documents.tar import headers as of
from mpitrain.job.data.documents.tar.headers import Members
from mpitrain.job.data.documents.tar.links import TarLink, resolved
from mpitrain.job.data.documents.tar.numbers import BLOCK, short_name
from mpitrain.job.data.documents.tar.sparse import MOST_BYTES, Extents

Place = tuple[int, int] | Extents | str | None
"""Where the bytes of a link are: (first byte, number of bytes), a sparse file, why they are nowhere, or None for a link to a folder."""

_IS_ENTRY = of.table_of(of.FILES + of.LINKS + of.SPARSE)
_IS_LINK, _IS_FOLDER, _IS_DEVICE, _IS_BEFORE = map(of.table_of, (of.LINKS, of.FOLDER, of.DEVICES, of.BEFORE_ENTRIES))
# In names with \n before and after each: hidden files, and folders of old programs.
_UNUSUAL = re.compile(rb"[\n/]\.(?!\.?/)|/\n")
_OF_MACOS = (b"._", b".DS_Store")


class TarEntries(NamedTuple):
    """The files in order, with their `names`. `headers`, `begins`, `sizes`: where their headers and bytes are, int64. `starts`: where
    the first header about each is, which may be one before its own.

    `long_names`: those that are not in the file's own header, by the place of the header. `odd`: of sparse files and of links, those
    whose bytes are no neighbours: the pieces, or why there are none. `links`: where links lead to. `changed`: the `starts`
    of the entries that readers of version 1 took otherwise, those left out here included.
    """

    names: list[bytes]
    headers: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    long_names: Mapping[int, bytes]
    odd: Mapping[int, Extents | str]
    links: Mapping[int, Place]
    remark: str
    changed: np.ndarray = np.empty(0, np.int64)

    def kept(self, is_kept: np.ndarray) -> "TarEntries":
        """Some of the files. `is_kept`: bool, of each."""
        if is_kept.all():
            return self
        its = (self.headers, self.begins, self.sizes, self.starts)
        headers, begins, sizes, starts = (each[is_kept] for each in its)
        names = list(itertools.compress(self.names, is_kept.tolist()))
        return self._replace(names=names, headers=headers, begins=begins, sizes=sizes, starts=starts)

    def name(self, file: MappedFile, header: int) -> bytes:
        """The name of the entry with its header at this byte."""
        return self.long_names.get(header) or short_name(file.bytes[header : header + BLOCK])


def entries_of(file: MappedFile, begin: int, end: int, links: Mapping[int, Place] | None = None) -> TarEntries:
    """Find all files from the byte `begin` to the byte `end - 1`. `links`: those of the whole tar file, if these bytes are a part.

    DamagedShardError: see TarReader.
    """
    members = of.walked(file, begin, end)
    names, kinds = list[bytes](), [np.empty(0, np.uint8)]
    for places, blocks in of.checked(file, members.headers):
        kinds.append(blocks[:, 156].copy())
        are_entries = _IS_ENTRY[kinds[-1]]
        names += _names_of(places[are_entries], blocks[are_entries], members.names)
    if members.flaw:
        raise DamagedShardError(f"{file.name}: the file is cut off: it has {file.size} bytes, and {members.flaw}")
    kind = np.concatenate(kinds)
    is_entry = _IS_ENTRY[kind]
    headers, sizes = members.headers[is_entry], members.sizes[is_entry]
    starts = members.headers.copy()
    starts[1:][_IS_BEFORE[kind[:-1]]] = 0  # such a header is the start of the next file
    starts = np.maximum.accumulate(starts)[is_entry]
    found = TarEntries(names, headers, headers + BLOCK, sizes, starts, members.names, {}, links or {}, "")
    if members.maps:
        found = found._replace(odd={header: _bounded(extents) for header, extents in members.maps.items()})
    left_out = [found.name(file, header) for header in members.headers[_IS_DEVICE[kind]].tolist()]
    if (is_link := _IS_LINK[kind[is_entry]]).any():
        if links is None:
            folders = [found.name(file, header) for header in members.headers[_IS_FOLDER[kind]].tolist()]
            found = found._replace(links=_places(file, members, found, is_link, folders))
        found = _followed(found, np.flatnonzero(is_link).tolist(), left_out)
    others = {*members.maps, *headers[is_link].tolist()}
    with_hidden, found = found, _without_hidden(file, found, left_out)
    if others or found is not with_hidden:
        is_changed = np.isin(with_hidden.headers, list(others)) | ~np.isin(with_hidden.headers, found.headers)
        found = found._replace(changed=with_hidden.starts[is_changed])
    is_open = not members.is_ended and end == file.size
    return found._replace(remark=_remark(file, left_out, is_open))


def _places(
    file: MappedFile, members: Members, found: TarEntries, is_link: np.ndarray, folders: list[bytes]
) -> dict[int, Place]:
    """Where the bytes of links are, by their headers."""
    links = {}
    for index in np.flatnonzero(is_link).tolist():
        header = int(found.headers[index])
        if header not in members.bodies:
            block = file.bytes[header : header + BLOCK]
            target = members.targets.get(header) or block[157:257].partition(b"\0")[0]
            links[index] = TarLink(block[156] == of.SYMBOLIC, target)
    places: dict[int, Place] = {}
    for index, end in resolved(found.names, links, folders).items():
        place: Place = None
        if isinstance(end, str):
            place = end
        elif end is not None:
            place = found.odd.get(int(found.headers[end])) or (int(found.begins[end]), int(found.sizes[end]))
        places[int(found.headers[index])] = place
    return places


def _followed(found: TarEntries, indices: Sequence[int], left_out: list[bytes]) -> TarEntries:
    """The files with the bytes that their links lead to. Those that lead to folders are added to `left_out`."""
    is_kept, odd = np.ones(len(found.names), np.bool_), dict(found.odd)
    for index in indices:
        header = int(found.headers[index])
        if header not in found.links:
            continue  # a hard link with the bytes of its file
        place = found.links[header]
        if place is None:
            is_kept[index] = False
            left_out.append(found.names[index])
        elif isinstance(place, (str, Extents)):
            odd[header] = place
        else:
            found.begins[index], found.sizes[index] = place
    return found._replace(odd=odd).kept(is_kept)


def _without_hidden(file: MappedFile, found: TarEntries, left_out: list[bytes]) -> TarEntries:
    """The files that are not hidden. The others are added to `left_out`, except for those of macOS."""
    all_names = b"\n".join([b"", *found.names, b""]).replace(b"\n./", b"\n")  # as `tar -C folder .` writes all names
    if not (b"/." in all_names or b"\n." in all_names or b"/\n" in all_names) or not _UNUSUAL.search(all_names):
        return found
    is_kept = np.ones(len(found.names), np.bool_)
    for index, name in enumerate(found.names):
        own = name.rpartition(b"/")[2]
        if own and not own.startswith(b"."):
            continue
        is_kept[index] = False
        if own:
            left_out += [name] * (not own.startswith(_OF_MACOS))
        elif found.sizes[index]:  # without bytes it is a folder, as programs before POSIX write it
            raise DamagedShardError(
                f"{file.name}: the file {name.decode(errors='replace')!r} at byte {found.headers[index]} has the name of a folder"
            )
    return found.kept(is_kept)


def _remark(file: MappedFile, left_out: Sequence[bytes], is_open: bool) -> str:
    """What users should know of a tar file, or ""."""
    said = []
    if left_out:
        first = left_out[0][:200].decode(errors="replace")
        are, others = ("are", " and others") if len(left_out) > 1 else ("is", "")
        said.append(
            f"{len(left_out)} of its entries {are} left out, as hidden files, links to folders, devices and pipes are no samples: "
            f"{first!r}{others}"
        )
    if is_open:
        said.append("it has not the two empty blocks that end a tar file, so its end may be missing")
    return f"{file.name}: {'; '.join(said)}" if said else ""


def _names_of(headers: np.ndarray, blocks: np.ndarray, long_names: Mapping[int, bytes]) -> list[bytes]:
    """The names of the files with these headers."""
    names = [name.partition(b"\0")[0] for name in blocks[:, :100].copy().view("S100")[:, 0].tolist()]
    for index in np.flatnonzero(blocks[:, 345]).tolist():
        names[index] = short_name(blocks[index].tobytes())
    if long_names:
        names = [long_names.get(header) or name for header, name in zip(headers.tolist(), names, strict=True)]
    return names


def _bounded(extents: Extents) -> Extents | str:
    """The extents, or why they are too large."""
    if extents.size <= MOST_BYTES:
        return extents
    return f"a sparse file with {extents.size} bytes; expected {MOST_BYTES} at most"
