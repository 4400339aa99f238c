"""Shards that are fetched into the node's cache before a lane needs them."""

from collections import OrderedDict, deque
from contextlib import suppress
from threading import Lock, Thread

from mpitrain.job.data.cache import ShardCache, needs_copy

_NUM_THREADS = 2  # besides the lane that waits for a shard
_NUM_REMEMBERED = 256


class FetchAhead:
    """Fetches shards in the order in which they are named, in threads. A lane that needs the shard meets the error, if there is one.

    `is_on`: whether it does so; else it does nothing.
    """

    def __init__(self, cache: ShardCache, *, is_on: bool = True) -> None:
        self._cache, self._is_on, self._lock = cache, is_on, Lock()
        self._waiting: deque[tuple[str, int]] = deque()
        self._num_threads = 0
        self._named: OrderedDict[str, None] = OrderedDict()  # of late

    def fetch(self, shard: str, size: int) -> None:
        """Fetch a shard soon: a path or URL of `size` bytes. A file that can be read where it is needs nothing."""
        if not self._is_on or not needs_copy(shard) or shard in self._named:
            return
        self._named[shard] = None
        if len(self._named) > _NUM_REMEMBERED:
            self._named.popitem(last=False)
        with self._lock:
            self._waiting.append((shard, size))
            if self._num_threads < _NUM_THREADS:
                self._num_threads += 1
                Thread(target=self._run, name="fetching shards", daemon=True).start()

    def _run(self) -> None:
        """Fetch until nothing waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                shard, size = self._waiting.popleft()
            with suppress(OSError, ValueError, ImportError), self._cache.local(shard, size):
                pass
