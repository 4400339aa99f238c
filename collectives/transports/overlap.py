"""Long arrays in chunks: while the messages of one chunk travel, a rank works on the next and the previous chunk."""

from collections import deque
from collections.abc import Callable, Iterator

LANES = 8  # the most unfinished chunks
_DONE = object()

Bounds = list[tuple[int, int]]  # begin and end of ranges of an array
# A started chunk: its messages between nodes (see `Scheduled.all_reduce_steps`), and the work to do after them.
Chunk = tuple[Iterator[None], Callable[[], None]]


def overlap(chunk: Callable[[Bounds, int], Chunk], ranges: Bounds, width: int, num_lanes: int = LANES) -> None:
    """Carry out `chunk(bounds, lane)` for each `width` elements of all `ranges`; a chunk begins while earlier chunks are unfinished.

    At most `num_lanes` chunks are unfinished, each on a lane of its own, the same on all ranks. All ranks begin and continue the chunks
    in the same order, and the chunks' schedules run in rounds. So no rank waits for a message that another rank sends only after it
    has waited for this rank.
    """
    under_way: deque[Chunk] = deque()
    end_of_all, start, num_begun = longest(ranges), 0, 0
    while start < end_of_all or under_way:
        before = list(under_way)
        if start < end_of_all and len(under_way) < num_lanes:
            bounds = [(min(begin + start, end), min(begin + start + width, end)) for begin, end in ranges]
            under_way.append(chunk(bounds, num_begun % num_lanes))
            next(under_way[-1][0], None)
            start, num_begun = start + width, num_begun + 1
        for messages, finish in before:
            if next(messages, _DONE) is _DONE:
                under_way.popleft()
                finish()


def longest(ranges: Bounds) -> int:
    """The number of elements of the longest range."""
    return max(end - begin for begin, end in ranges)
