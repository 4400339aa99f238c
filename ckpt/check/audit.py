"""The audit of a checkpoint's HDF5 files: they hold the tensors of the manifest, and no link or source that leads elsewhere.

HDF5 files may point to anything: external and soft links, raw data and virtual sources in other files, filters that load a library. Our
own reader ignores all of these; h5py, h5dump and MATLAB follow them. HDF5 itself may also crash on a damaged file, or never return. So
a child process with limits opens the files, and its crash or timeout is also a finding.

This module has the code of the child (`main`); inspecting.py starts it. It reads no data of the files, and follows no link.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

import h5py

from ckpt.format.boxes import Shape
from ckpt.format.hdf5 import INDEX_NAME, h5_type
from ckpt.format.manifest import File, Manifest, Tensor
from ckpt.storage.catalog import read_manifest
from ckpt.storage.child import MORE_MEMORY, explained
from ckpt.storage.local_path import LocalPath, open_folder, open_regular

_BYTES_OF_SOURCE = 32 << 10  # at most: HDF5 has two lists of a tensor's sources in memory
_MAX_ATTRIBUTES = 64
_MAX_FINDINGS = 100  # per file


def main() -> None:
    """Audit the checkpoint `sys.argv[1]`; prints JSON lists of file, tensor or null, problem or null.

    The first list of each file has no problem. It shows the parent at which file this process ended.
    """
    path = LocalPath(sys.argv[1])
    manifest = read_manifest(path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_sources = max((len(tensor.blocks) for tensor in manifest.tensors.values()), default=0)
    limit = pages * resource.getpagesize() + MORE_MEMORY + most_sources * _BYTES_OF_SOURCE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for finding in findings(path, manifest):
        print(json.dumps(finding), flush=True)


def findings(path: LocalPath, manifest: Manifest) -> Iterator[tuple[str, str | None, str | None]]:
    """(file, tensor or None, problem) of the checkpoint `path`. The first entry of each file has no problem."""
    folder = open_folder(path)
    try:
        for file in manifest.files:
            yield file.name, None, None
            try:
                for tensor, problem in islice(_findings(folder, manifest, file), _MAX_FINDINGS):
                    yield file.name, tensor, problem
            # HDF5 raises errors of many classes.
            except Exception as error:
                problem = (str(error) or type(error).__name__)[:200]
                yield file.name, None, explained(f"HDF5 cannot read it: {problem!r}")
    finally:
        os.close(folder)


Finding = tuple[str | None, str]
ProblemOf = Callable[[str, h5py.h5d.DatasetID, h5py.h5p.PropDCID], str | None]


def _findings(folder: int, manifest: Manifest, file: File) -> Iterator[Finding]:
    fd = open_regular(file.name, folder)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_sec2()
    try:
        # By its descriptor, because HDF5 follows links.
        opened = h5py.h5f.open(f"/proc/self/fd/{fd}".encode(), h5py.h5f.ACC_RDONLY, fapl=access)
        root = h5py.h5g.open(opened, b"/")
        seen = {_address(root)}
        if file.name == INDEX_NAME:
            yield from _attributes(root, None)
            yield from _group(root, "", _tree(manifest.tensors), seen, partial(_index_problem, manifest))
        else:
            yield from _group(root, "", dict.fromkeys(file.datasets), seen, partial(_data_problem, file))
    finally:
        os.close(fd)


def _tree(names: Iterable[str]) -> dict:
    """The groups in `names`, as nested dicts; None stands for a tensor."""
    root: dict = {}
    for name in names:
        *groups, last = name.split("/")
        at = root
        for part in groups:
            at = at.setdefault(part, {})
        at[last] = None
    return root


def _data_problem(file: File, name: str, dataset: h5py.h5d.DatasetID, plist: h5py.h5p.PropDCID) -> str | None:
    """The difference of a data file's dataset from the manifest, or None."""
    expected = file.datasets[name]
    if plist.get_layout() != h5py.h5d.CONTIGUOUS:
        return "is not contiguous"
    if problem := _kind_problem(dataset, (expected.elements,), name):
        return problem
    if dataset.get_offset() != expected.offset_bytes:
        return f"begins at byte {dataset.get_offset()}, expected {expected.offset_bytes}"
    return None


def _index_problem(manifest: Manifest, name: str, dataset: h5py.h5d.DatasetID, plist: h5py.h5p.PropDCID) -> str | None:
    """The difference of a tensor in the index from the manifest, or None."""
    tensor = manifest.tensors[name]
    virtual = plist.get_layout() == h5py.h5d.VIRTUAL
    if virtual != bool(tensor.shape and tensor.blocks):
        return "is virtual" if virtual else "is not virtual"
    # The sources' names are checked first, because HDF5 may open sources to find a shape.
    if virtual and (problem := _source_problem(manifest, tensor, plist)):
        return problem
    if problem := _kind_problem(dataset, tensor.shape, tensor.dtype):
        return problem
    return _mapping_problem(tensor, plist) if virtual else None


def _source_problem(manifest: Manifest, tensor: Tensor, plist: h5py.h5p.PropDCID) -> str | None:
    count = plist.get_virtual_count()
    if count != len(tensor.blocks):
        return f"has {count} sources, expected {len(tensor.blocks)}"
    for i, block in enumerate(tensor.blocks):
        found = plist.get_virtual_filename(i), plist.get_virtual_dsetname(i).lstrip("/")
        expected = manifest.files[block.file].name, tensor.dtype
        if found != expected:
            return (
                f"takes values from {found[0][:100]!r}, {found[1][:100]!r}; expected {expected[0]!r}, {expected[1]!r}"
            )
    return None


def _mapping_problem(tensor: Tensor, plist: h5py.h5p.PropDCID) -> str | None:
    for i, block in enumerate(tensor.blocks):
        target, source, size = plist.get_virtual_vspace(i), plist.get_virtual_srcspace(i), block.box.size
        last = tuple(o + n - 1 for o, n in zip(block.offset, block.shape, strict=True))
        if _selected(target) != (block.offset, last, size):
            return f"puts a source elsewhere than to {block.box}"
        if _selected(source) != ((block.start,), (block.start + size - 1,), size):
            return f"takes {block.box} from another place than element {block.start}"
    return None


def _selected(space: h5py.h5s.SpaceID) -> tuple[Shape, Shape, int]:
    first, last = space.get_select_bounds()
    return tuple(map(int, first)), tuple(map(int, last)), int(space.get_select_npoints())


def _kind_problem(dataset: h5py.h5d.DatasetID, shape: Shape, dtype: str) -> str | None:
    if not dataset.get_type().equal(h5_type(dtype)):
        return f"has another type, expected {dtype}"
    space = dataset.get_space()
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        return "has no shape"
    found = space.get_simple_extent_dims(), space.get_simple_extent_dims(True)
    return None if found == (shape, shape) else f"has the shape {found[0]} up to {found[1]}, expected {shape}"


def _group(
    group: h5py.h5g.GroupID, path: str, expected: Mapping[str, dict | None], seen: set[int], problem_of: ProblemOf
) -> Iterator[Finding]:
    """Check that `group` has the expected members, only by hard links, and none twice: so there are no cycles and no foreign files."""
    if group.get_num_objs() > len(expected):
        names = (group.get_objname_by_idx(i).decode(errors="replace") for i in range(len(expected) + 1))
        extra = next((name for name in names if name not in expected), None)
        yield None, f"the group '/{path}' holds {extra!r:.100}, which the manifest does not know"
    for name, inside in expected.items():
        full = f"{path}/{name}" if path else name
        key = name.encode()
        if not group.links.exists(key):
            yield full, "is missing"
            continue
        if (link := group.links.get_info(key).type) != h5py.h5l.TYPE_HARD:
            what = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "a link to another file"}
            yield full, f"is {what.get(link, 'a link of an unknown kind')}"
            continue
        is_group = h5py.h5o.get_info(group, key).type == h5py.h5o.TYPE_GROUP
        if h5py.h5o.get_info(group, key).type not in (h5py.h5o.TYPE_GROUP, h5py.h5o.TYPE_DATASET):
            yield full, "is neither a group nor a dataset"
            continue
        if is_group != (inside is not None):
            yield full, "is a group" if is_group else "is a dataset; expected a group"
            continue
        opened = h5py.h5o.open(group, key)
        if (address := _address(opened)) in seen:
            yield full, "stands under two names"
            continue
        seen.add(address)
        yield from _attributes(opened, full)
        if inside is not None:
            yield from _group(opened, full, inside, seen, problem_of)
        elif problem := _dataset_problem(full, opened, problem_of):
            yield full, problem


def _dataset_problem(name: str, dataset: h5py.h5d.DatasetID, problem_of: ProblemOf) -> str | None:
    plist = dataset.get_create_plist()
    if plist.get_external_count():
        return "keeps its values in another file"
    if plist.get_nfilters():
        return "passes through a filter"
    return problem_of(name, dataset, plist)


def _attributes(owner: h5py.h5g.GroupID, name: str | None) -> Iterator[Finding]:
    """Check that attributes are numbers and text, not references."""
    if (count := h5py.h5a.get_num_attrs(owner)) > _MAX_ATTRIBUTES:
        yield name, f"has {count} attributes"
        return
    for i in range(count):
        attribute = h5py.h5a.open(owner, index=i)
        if attribute.get_type().get_class() not in (h5py.h5t.STRING, h5py.h5t.INTEGER, h5py.h5t.FLOAT):
            yield name, f"has the attribute {attribute.name!r:.100}, which is neither text nor a number"


def _address(opened: h5py.h5g.GroupID) -> int:
    return h5py.h5o.get_info(opened).addr
