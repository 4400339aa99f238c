"""What every collective goes through once its arrays are checked: now or later, the choice of the algorithm, the record, plans."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any
from weakref import ref

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.communicator.plans import Plan, Plans, key_of
from collectives.diagnosis.record import Entry, Log
from collectives.diagnosis.stacks import issued_here
from collectives.progress.issued import Posted
from collectives.progress.work import Queued, Work
from collectives.selection.selector import Selector
from collectives.transports.node.posted import Post


@dataclass(slots=True)
class Call:
    """A collective and its arguments, of which all but the arrays' contents are the same on all ranks."""

    operation: str
    arrays: tuple[Buffer, ...]  # the first by whose size the algorithm is chosen
    algorithm: str
    op: str | None = None
    root: int | None = None
    counts: Sequence[int] | None = None
    accumulate: str | None = None
    async_op: bool = False  # whether it is carried out later


class Calls:
    """The part of a Communicator that carries out `Call`s. Only as a part of it, which sets these attributes."""

    mpi: Any
    rank: int
    size: int
    checked: bool
    _memory: Any  # a NodeMemory; None on several nodes
    _group: Any
    _progress: Any
    _devices: Any
    _selector: Selector
    _plans: Plans
    _keeps_plans: bool
    _log: Log
    _enter: Any
    _transport: Any  # of an algorithm
    _transports: dict[str, Any]  # those made so far
    _issues: Any  # the Issues that a Progress without a thread needs
    _on_progress: Any  # the Communicator that carries out asynchronous operations
    _issued: "ref[Queued] | None"  # the last one that was issued here

    def _issue(
        self,
        async_op: bool,
        call: Call,
        carry_out: Callable[[Any], Any],
        result: Any,
        post: Callable[[Any], Post] | None = None,
    ) -> Any:
        """Carry out a call whose arrays are checked: now, or later as a Work or with its group.

        `carry_out(comm)`: on the communicator that is to do it. `result`: the caller's array, in which a group leaves the result.
        `post(transport)`: posts it, where it may be carried out so: see `_posted`.
        """
        if call.accumulate not in (None, "fp32"):
            raise ValueError(f"{call.operation}: accumulate {call.accumulate!r}; expected 'fp32' or None")
        if not async_op and self._group is None:
            return carry_out(self)
        self._progress.pending()  # an error on a communicator that was freed
        on_device = any(b.device is not None for b in call.arrays)
        if not (on_device and call.algorithm == "nccl"):
            self._choose(call, call.arrays[0].nbytes, "private")  # wrong ones are errors now, not at their turn
        if self._group is not None:
            if async_op:
                raise ValueError("group: operations within a group take no async_op")
            self._group.add(call, carry_out, result)
            return result
        if on_device:
            return self._devices.issue(partial(carry_out, self))
        call.async_op = True
        if post is not None and (work := self._posted(call, post)) is not None:
            return work
        operation = partial(carry_out, self._on_progress())
        return self._queue(partial(issued_here().carry_out, operation), call.operation)

    def _queue(self, operation: Callable[[], Any], name: str) -> Work:
        """Issue `operation`, which is to be called `name`."""
        if self._issued is not None:
            self._take_over()
        work = self._progress.issue(operation, name, self._issues)
        self._issued = ref(work)
        return work

    def _flush(self) -> None:
        """Before a collective: carry out what this thread has issued, and what another has issued here and left to this one."""
        if self._issued is not None:
            self._take_over()
        self._progress.flush()

    def _another_s(self) -> Queued | None:
        """The last one that was issued here, if by another thread, and not ended."""
        issued = self._issued
        work = None if issued is None else issued()
        if work is None or work._ended:
            self._issued = None
            return None
        return work if work.issuer != get_ident() else None

    def _take_over(self) -> None:
        if (work := self._another_s()) is not None:
            work.hand_over()

    def _posted(self, call: Call, post: Callable[[Any], Post]) -> Work | None:
        """An operation that ranks post and go on from; None where its array, or the ranks', are not for that."""
        shared, b = self._transports.get("shared"), call.arrays[0]
        if self.checked or self._progress.on_thread or shared is None or not shared.posts.takes(b.flat):
            return None
        if call.algorithm not in ("auto", "shared"):
            return None
        if shared.posts.are_many:
            self._progress.drain()
        entry = self._log.enter(call.operation, b.flat.size, b.dtype.name, call.op, call.root, "shared")
        with entry.failing():
            posted = Posted(post(shared), entry)

        def operation() -> Any:
            posted.finish()
            return call.arrays[-1].result()

        return self._progress.queue(operation, posted)

    def _choose(self, call: Call, nbytes: int, memory: str) -> str:
        """The algorithm; ValueError if the one that was asked for is unknown or cannot work."""
        if call.operation in ("gather", "scatter"):
            nbytes *= self.size  # a rank knows its part alone here
        dtype = call.arrays[0].dtype
        return self._selector.choose(call.operation, call.algorithm, dtype=dtype, nbytes=nbytes, memory=memory)

    def _begin(self, call: Call) -> Entry:
        """Choose the algorithm, and enter the operation in the flight record; in checked mode compare it between the ranks."""
        if self._issued is not None or self._progress.pending():
            self._flush()
        b, memory = call.arrays[0], self._memory
        size, name = b.flat.size, b.dtype.name
        number = 0 if memory is None or memory.holds_none else memory.find(b.flat)[0]
        where = "node" if number else "private"
        if not self.checked:
            chosen = self._choose(call, b.flat.nbytes, where)
            return self._log.enter(call.operation, size, name, call.op, call.root, chosen)
        options = {
            "op": call.op,
            "root": call.root,
            "counts": call.counts and tuple(call.counts),
            "algorithm": call.algorithm,
            "accumulate": call.accumulate,
            "async_op": call.async_op or None,
        }
        said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        place = memory.place(b.flat) if number else "private memory"
        words = f"{call.operation}({size} x {name}, {said}, in {place})"
        entry = self._enter(call.operation, words, call.root, call.op, size, name)
        with entry.failing():
            entry.by(self._choose(call, b.flat.nbytes, where))
        return entry

    # Plans

    def _key(self, x: Any, out: Any, call: Hashable) -> Hashable:
        """The key of the plan of `call`, an operation and its options, on these arrays; None where none may be used or made."""
        if self._group is not None or not self._keeps_plans or self._progress.pending():
            return None
        if self._issued is not None and self._another_s() is not None:
            return None
        where = key_of(x)
        also = where if out is None else key_of(out)
        return None if where is None or also is None else (call, where, also)

    def _repeat(self, key: Hashable) -> bool:
        """Make the call again that `key` has a plan of, if it has one."""
        try:
            plan = self._plans.find(key)
        except TypeError:  # an argument that no dict takes: the checks are to name it
            return False
        if plan is None:
            return False
        entry = self._log.enter(*plan.entered)
        try:
            plan.call(*plan.arguments)
        except BaseException as error:
            entry.fail(error)
            raise
        entry.leave()  # instead of a `with`, which takes 0.2 us
        return True

    def _plan(self, key: Hashable, entry: Entry, *arguments: Any) -> None:
        """Keep the plan of a call that was carried out on `arguments`, in private memory, if its transport makes plans."""
        if key is not None and entry.algorithm in ("mpi", "staged"):
            flats = [array for array in arguments if isinstance(array, np.ndarray)]
            if flats[0].dtype.kind == "c":
                return  # the conjugate of a torch tensor, which is to be refused, lies where the tensor does
            private = self._memory is None or not any(self._memory.find(flat)[0] for flat in flats)
            if private and all(flat.size for flat in flats):
                made = self._transport(entry.algorithm).plan(entry.name, *arguments)
                if made is not None:
                    self._plans.keep(key, Plan(made[0], made[1], entry.arguments))
