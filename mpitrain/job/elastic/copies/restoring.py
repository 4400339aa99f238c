"""Finds the newest state of which all copies are left, and loads it on any number of ranks.

A rank reads the copies of its own node directly. A box that lies only on other nodes comes in one message from a rank there.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import ckpt
from ckpt.format.boxes import Box
from ckpt.tensors import inspect
from collectives import Communicator
from collectives.arrays.dtypes import DTYPES
from mpitrain.job.elastic.copies.files import CopyPart, Header, StateKey, complete_copies, open_data, remove_copies


class _Entry(NamedTuple):
    """What `weights.state` asks of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class StateEntries(dict[str, _Entry]):
    """The tensors of a state by name, and its meta: the part of `ckpt.Checkpoint` that a load needs."""

    def __init__(self, entries: Mapping[str, _Entry], meta: dict[str, Any]) -> None:
        super().__init__(entries)
        self.meta = meta


@dataclass(frozen=True)
class _Copy:
    """A copy, with the files that hold it, by node. With several nodes one may have two: a rank's own, and the one for its partner."""

    header: Header
    paths: dict[int, list[str]]


class _Need(NamedTuple):
    """The elements `box` of a tensor, which lie in a part of the copy of rank `source`, and belong to the wanted box `target`."""

    source: int
    part: CopyPart
    box: Box
    target: int


def find_state(comm: Communicator, run: str, *, from_epoch: int = 0, below: float = math.inf) -> "NodeCopies | None":
    """The newest state of a run of which the nodes of `comm` have all copies, or None. Collective.

    `from_epoch`: the state is of this epoch or a later one. `below`: it has fewer steps than this.
    """
    by_rank = {rank: number for number, ranks in enumerate(comm.nodes) for rank in ranks}
    node_of = [by_rank[rank] for rank in range(comm.size)]
    here = [(str(path), header) for path, header in complete_copies(run)] if comm.node.rank == 0 else []
    states: dict[StateKey, dict[int, _Copy]] = {}
    for rank, found in enumerate(comm.all_gather_object(here)):
        for path, data in found:
            header = msgspec.json.decode(data, type=Header)
            copies = states.setdefault(header.state, {})
            copies.setdefault(header.rank, _Copy(header, {})).paths.setdefault(node_of[rank], []).append(path)
    whole = [
        key
        for key, copies in states.items()
        if len(copies) == key.size and key.epoch >= from_epoch and key.step < below
    ]
    return NodeCopies(comm, run, states[max(whole)], node_of) if whole else None


class NodeCopies:
    """A state in node memory, as a StoredState of `weights.state.load`."""

    def __init__(self, comm: Communicator, run: str, copies: dict[int, _Copy], node_of: list[int]) -> None:
        """`copies`: by rank of the job that took them. `node_of`: the node of each rank of `comm`."""
        self._comm, self._run, self._copies, self._node_of = comm, run, copies, node_of
        first = copies[0].header
        self.epoch, self.step, self.meta = first.epoch, first.step, first.meta
        self._parts: dict[str, list[tuple[int, CopyPart]]] = {}
        for rank in sorted(copies):
            for part in copies[rank].header.parts:
                self._parts.setdefault(part.name, []).append((rank, part))
        self._open: dict[int, np.ndarray] = {}

    def __str__(self) -> str:
        return f"the copies of step {self.step} in node memory"

    def remove_others(self) -> None:
        """Make room for the next copies: remove the run's other copies, where this state alone is as safe as with them. Collective.

        It is not, if the loss of one more node may take a copy whose only other one is on its way to a partner. Then they stay until
        the run has its second new copy.
        """
        is_safe = self._comm.num_nodes == 1 or all(len(copy.paths) > 1 for copy in self._copies.values())
        if is_safe and self._comm.node.rank == 0:
            node = self._node_of[self._comm.rank]
            mine = {path for copy in self._copies.values() for path in copy.paths.get(node, ())}
            remove_copies(self._run, but=mine)

    def entries(self) -> Any:
        found = {name: _Entry(name, parts[0][1].full, parts[0][1].dtype) for name, parts in self._parts.items()}
        return StateEntries(found, self.meta)

    def load(self, tensors: Mapping[str, Any], *, comm: Communicator | None, **options: Any) -> dict[str, Any]:
        """Fill `tensors` as `ckpt.load` does; returns the meta. Collective over the ranks that have found the state.

        ckpt.CheckpointError on all ranks for a tensor that the state lacks, or has with another shape or dtype.
        """
        with self._comm.together():
            wanted = [
                (local.name, each.box, each.array)
                for local in inspect(tensors, writable=True)
                for each in local.boxes
                if self._check(local.name, local.description)
            ]
        asked = [(name, box.offset, box.shape) for name, box, _ in wanted]
        mine, node = self._comm.rank, self._node_of[self._comm.rank]
        for need in self._needs(asked):
            if node in self._copies[need.source].paths:
                self._put(wanted[need.target], need.box, self._elements(need))
        if not all(set(copy.paths) >= set(self._node_of) for copy in self._copies.values()):
            for need, elements in self._exchange(self._comm.all_gather_object(asked), mine):
                self._put(wanted[need.target], need.box, elements)
        self._open.clear()  # the files are removed soon, and a mapping would keep their memory
        return self.meta

    def _check(self, name: str, described: Any) -> bool:
        if (parts := self._parts.get(name)) is None:
            raise ckpt.CheckpointError(f"{self} have no tensor {name}")
        there = (parts[0][1].full, parts[0][1].dtype)
        if there != (described.shape, described.dtype):
            raise ckpt.CheckpointError(
                f"{self}: {name} is {there[1]} {there[0]} there, {described.dtype} {described.shape} here"
            )
        return True

    def _needs(self, asked: list[tuple[str, Any, Any]]) -> Iterator[_Need]:
        """What a rank that asks for these boxes needs, in the same order on all ranks."""
        for target, (name, offset, shape) in enumerate(asked):
            for source, part in self._parts[name]:
                if (box := part.box.intersect(Box(tuple(offset), tuple(shape)))) is not None:
                    yield _Need(source, part, box, target)

    def _elements(self, need: _Need) -> np.ndarray:
        """The elements from a copy on this node."""
        path = self._copies[need.source].paths[self._node_of[self._comm.rank]][0]
        data = self._open.get(need.source)
        if data is None:
            data = self._open[need.source] = open_data(Path(path))
        part, dtype = need.part, DTYPES[need.part.dtype].numpy
        flat = data[part.at : part.at + part.box.size * dtype.itemsize].view(dtype)
        return flat.reshape(part.shape)[need.box.relative_to(part.offset).slices]

    @staticmethod
    def _put(wanted: tuple[str, Box, np.ndarray], box: Box, elements: np.ndarray) -> None:
        _, target, array = wanted
        array[box.relative_to(target.offset).slices] = elements

    def _server(self, source: int) -> int:
        """The rank that sends the copy of `source` to other nodes."""
        return min(self._node_of.index(node) for node in self._copies[source].paths)

    def _exchange(self, asked: list[list[tuple[str, Any, Any]]], mine: int) -> Iterator[tuple[_Need, np.ndarray]]:
        """Send what other nodes need of this rank's node; yields what this rank needs of other nodes. `asked`: by all ranks."""
        comm, messages = self._comm, []
        for rank in range(comm.size):
            theirs = [
                need
                for need in self._needs(asked[rank])
                if self._node_of[rank] not in self._copies[need.source].paths and self._server(need.source) == mine
            ]
            if theirs and rank != mine:
                packed = [np.ascontiguousarray(self._elements(need)).reshape(-1).view(np.uint8) for need in theirs]
                messages.append(comm.isend(np.concatenate(packed), rank))
        by_server: dict[int, list[_Need]] = {}
        for need in self._needs(asked[mine]):
            if self._node_of[mine] not in self._copies[need.source].paths:
                by_server.setdefault(self._server(need.source), []).append(need)
        for server, needs in by_server.items():
            sizes = [need.box.size * DTYPES[need.part.dtype].numpy.itemsize for need in needs]
            received = comm.recv(np.empty(sum(sizes), np.uint8), server)
            at = 0
            for need, nbytes in zip(needs, sizes, strict=True):
                dtype = DTYPES[need.part.dtype].numpy
                yield need, received[at : at + nbytes].copy().view(dtype).reshape(need.box.shape)
                at += nbytes
        for message in messages:
            message.wait()
