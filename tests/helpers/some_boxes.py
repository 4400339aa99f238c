"""Boxes for property tests: any within a shape, exact covers of one, and covers dealt out to ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ckpt
from ckpt import Box

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: Any, shape: Sequence[int]) -> Box:
    """A filled box inside `shape`."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True)))


@st.composite
def partitions(draw: Any, shape: Sequence[int]) -> list[Box]:
    """Boxes that cover `shape` exactly: guillotine cuts, in any order."""
    todo, done = [Box.full(shape)], []
    while todo:
        box = todo.pop()
        axes = [d for d, n in enumerate(box.shape) if n > 1]
        if not axes or len(done) + len(todo) > 8 or draw(st.booleans()):
            done.append(box)
            continue
        d = draw(st.sampled_from(axes))
        cut = draw(st.integers(1, box.shape[d] - 1))
        first = Box(box.offset, (*box.shape[:d], cut, *box.shape[d + 1 :]))
        rest = (*box.shape[:d], box.shape[d] - cut, *box.shape[d + 1 :])
        second = Box((*box.offset[:d], box.offset[d] + cut, *box.offset[d + 1 :]), rest)
        todo += [first, second]
    found: list[Box] = draw(st.permutations(done))
    return found


@st.composite
def dealt(draw: Any, shape: Sequence[int], num_ranks: int) -> list[list[Box]]:
    """An exact cover of `shape`, of each rank the boxes that it holds: many, one or none."""
    boxes: list[list[Box]] = [[] for _ in range(num_ranks)]
    for box in draw(partitions(shape)):
        boxes[draw(st.integers(0, num_ranks - 1))].append(box)
    return boxes


def shards_of(array: np.ndarray, boxes: Sequence[Box]) -> list[ckpt.Shard]:
    """Copies of those boxes of an array."""
    return [ckpt.Shard(np.array(array[box.slices], order="C"), array.shape, box.offset) for box in boxes]
