"""The Work of an operation that NCCL carries out."""

from collections.abc import Sequence
from typing import Any

from collectives.arrays.buffer import Buffer
from collectives.progress.work import Work
from collectives.transports.gpu.nccl_queue import Handle


class OnStream(Work):
    """An operation on NCCL's stream. Each `wait()` makes the current stream, not the host, wait for it.

    `handles`: each with an array whose library has the current stream, which may be another one at each `wait()`.
    """

    def __init__(self, result: Any, handles: Sequence[tuple[Handle, Buffer]]) -> None:
        super().__init__()
        self._result, self._handles = result, handles

    def done(self) -> bool:
        return all(handle.done() for handle, _ in self._handles)

    def _finish(self) -> None:
        for handle, array in self._handles:
            handle.wait(array.current_stream())
