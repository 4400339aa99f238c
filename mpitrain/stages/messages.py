"""The messages of one rank in one step of a pipeline: activations to the next stage, gradients to the stage before.

Between two ranks activations arrive in the order in which they are needed, and so do gradients: the checker of the schedules proves it.
So one tag for each is enough. A rank posts the receives of its next actions ahead of time, so that messages arrive while it computes.

A receive needs the shape of its message. The ranks agree on the shapes of the inputs at the beginning of a step. The first time that
a stage passes on the activations of an input of some shape, it sends a note of their shape and dtype before them.
"""

from collections import deque
from collections.abc import Hashable, Sequence

import torch

from collectives import Communicator, Work
from mpitrain.stages.schedules import Action, Schedule

_AHEAD = 2
"""Receives that are posted before the action that needs them."""

_TAGS = {"F": 0, "B": 1}
_TAG_OF_NOTES = 2
_MAX_DIMS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Shape = tuple[int, ...]

Streams = dict[tuple[int, Hashable], tuple[Shape, torch.dtype]]
"""The shape and dtype of the activations that a stage passes on, by the stage and the shapes of the model's inputs."""


class Messages:
    """The messages of one rank in one step. `shapes`: of the inputs of each micro-batch. `device`: of the activations."""

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        streams: Streams,
        shapes: Sequence[Hashable],
        device: torch.device,
    ) -> None:
        self._comm, self._streams, self._shapes, self._device = comm, streams, shapes, device
        self._ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
        self._here: dict[tuple[str, int, int], torch.Tensor] = {}  # between two stages of this rank
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()
        self._expected = deque(
            needed
            for action in schedule.program(comm.rank)
            if (needed := self.needed(action)) is not None and self._ranks[needed[1]] != comm.rank
        )
        self._posted: deque[tuple[tuple[str, int, int], Work]] = deque()

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return self._ranks[stage]

    def needed(self, action: Action) -> tuple[str, int, int] | None:
        """What an action needs from another stage: activations "F" or a gradient "B", its stage and its micro-batch."""
        kind, stage, micro = action
        if kind == "F":
            return ("F", stage - 1, micro) if stage else None
        return ("B", stage + 1, micro) if kind != "W" and stage < len(self._ranks) - 1 else None

    def send(self, kind: str, stage: int, micro: int, x: torch.Tensor) -> None:
        """Pass on what a stage has computed: activations, "F", or the gradient of its input, "B"."""
        rank = self._ranks[stage + 1 if kind == "F" else stage - 1]
        if rank == self._comm.rank:
            self._here[kind, stage, micro] = x
            return
        x = x.contiguous()
        if kind == "F":
            key = stage, self._shapes[micro]
            if key not in self._streams:
                self._streams[key] = tuple(x.shape), x.dtype
                self._keep(_note(x), rank, _TAG_OF_NOTES)
            elif self._streams[key] != (tuple(x.shape), x.dtype):
                raise RuntimeError(
                    f"pipeline: stage {stage} passes on a tensor of shape {tuple(x.shape)}, {x.dtype}; for earlier inputs of the same "
                    f"shapes it passed on {self._streams[key]}; expected the same as before"
                )
        self._keep(x, rank, _TAGS[kind])
        while self._sent and self._sent[0][0].done():
            self._sent.popleft()[0].wait()

    def _keep(self, x: torch.Tensor, rank: int, tag: int) -> None:
        self._sent.append((self._comm.isend(x, rank, tag), x))

    def receive(self, kind: str, stage: int, micro: int) -> torch.Tensor:
        """What stage `stage` has passed on: see `send`."""
        if self.rank_of(stage) == self._comm.rank:
            return self._here.pop((kind, stage, micro))
        if not self._posted:
            self._post(self._expected.popleft())
        needed, work = self._posted.popleft()
        assert needed == (kind, stage, micro)
        while self._expected and len(self._posted) < _AHEAD and self._key(self._expected[0]) in self._streams:
            self._post(self._expected.popleft())
        x: torch.Tensor = work.wait()
        return x

    def _key(self, needed: tuple[str, int, int]) -> tuple[int, Hashable]:
        """The activations whose shape a message has: the gradient of a stage's input has that of what the stage before passed on."""
        kind, stage, micro = needed
        return stage if kind == "F" else stage - 1, self._shapes[micro]

    def _post(self, needed: tuple[str, int, int]) -> None:
        kind, stage, _ = needed
        if (key := self._key(needed)) not in self._streams:
            note = torch.empty(_MAX_DIMS + 2, dtype=torch.int64)
            self._comm.recv(note, self._ranks[stage], _TAG_OF_NOTES)
            self._streams[key] = _read(note)
        shape, dtype = self._streams[key]
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self._posted.append((needed, self._comm.irecv(x, self._ranks[stage], _TAGS[kind])))

    def end(self) -> None:
        """Wait until the other ranks have what this one has sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _note(x: torch.Tensor) -> torch.Tensor:
    if x.ndim > _MAX_DIMS or x.dtype not in _DTYPES:
        raise ValueError(
            f"pipeline: a stage passes on a tensor of shape {tuple(x.shape)}, {x.dtype}; expected at most {_MAX_DIMS} dimensions and "
            f"one of {', '.join(map(str, _DTYPES))}"
        )
    return torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (_MAX_DIMS - x.ndim)])


def _read(note: torch.Tensor) -> tuple[Shape, torch.dtype]:
    dtype, ndim, *dims = note.tolist()
    return tuple(dims[:ndim]), _DTYPES[dtype]
