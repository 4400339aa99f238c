"""The steps of every collective after the check of its arrays: now or later, the choice of the algorithm, the record, plans."""

from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collectives.communicator import unfinished
from collectives.communicator.group import Groups
from collectives.communicator.plans import Plan, Plans, key_of
from collectives.communicator.transports import Transports
from collectives.diagnosis.record import Entry
from collectives.diagnosis.recorder import Recorder
from collectives.diagnosis.stacks import issued_here
from collectives.progress.issued import Posted
from collectives.progress.on_stream import OnStream
from collectives.progress.queue import AsyncQueue
from collectives.progress.work import Work
from collectives.transports.call import Call
from collectives.transports.node.posted import Post
from collectives.transports.node.shared import Shared

if TYPE_CHECKING:  # importing it starts MPI
    from collectives.transports.gpu.device import Devices


class Repeated(Enum):
    """The result of `Dispatch.repeat` if it found a plan and carried the plan out."""

    DONE = 0


DONE = Repeated.DONE
_LONG = 1 << 40  # bytes: ranks whose arrays have different sizes choose the algorithm of long arrays


class Dispatch:
    """Carries out the `Call`s of one communicator: in host memory by its transports, in GPU memory by its devices."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        recorder: Recorder,
        queue: AsyncQueue,
        groups: Groups,
        transports: Transports,
        devices: "Devices",
        plans: Plans,
        on_progress: "Callable[[], Dispatch]",
    ) -> None:
        """`on_progress()`: the Dispatch of asynchronous operations: this one, or that of the progress thread's communicator."""
        self.rank, self.size = rank, size
        self.transports, self.devices = transports, devices
        self._recorder, self._queue, self._groups, self._plans = recorder, queue, groups, plans
        self._on_progress = on_progress
        self._keeps_plans = not recorder.checked
        self._find_plan, self._note = plans.get, recorder.log.enter

    def issue(
        self,
        async_op: bool,
        call: Call,
        carry_out: "Callable[[Dispatch], Any]",
        result: Any,
        post: Callable[[Shared], Post] | None = None,
    ) -> Any:
        """Carry out a call whose arrays are checked: now, or later as a Work or with its group.

        `carry_out(dispatch)`: carries out the call by this Dispatch. `result`: the caller's array, in which a group leaves the result.
        `post(transport)`: posts the operation, if ranks can post this operation: see `_posted`.
        """
        if call.accumulate not in (None, "fp32"):
            raise ValueError(f"{call.operation}: accumulate {call.accumulate!r}; expected 'fp32' or None")
        group = self._groups.current
        if self._recorder.checked:
            unfinished.refuse(call.operation, call.arrays)
        if not async_op and group is None:
            return carry_out(self)
        self._queue.progress.pending()  # an error on a communicator that was freed
        on_device = any(b.device is not None for b in call.arrays)
        chosen = call.algorithm
        if not (on_device and call.algorithm == "nccl"):
            # a wrong algorithm is an error now, not at the operation's turn
            chosen = self._choose(call, call.arrays[0].nbytes, "private")
        if group is not None:
            if async_op:
                raise ValueError("group: operations within a group take no async_op")
            call.is_encoded = chosen == "encoded"
            group.add(call, partial(carry_out, self), result)
            return result
        if on_device:
            return OnStream(*self.devices.issue(partial(carry_out, self)))
        call.async_op = True
        if post is not None and (work := self._posted(call, post)) is not None:
            return work
        operation = partial(carry_out, self._on_progress())
        work = self._queue.issue(partial(issued_here().carry_out, operation), call.operation)
        if self._recorder.checked:
            unfinished.note(work, call.operation, call.arrays)
        return work

    def refuse_group(self, operation: str) -> None:
        """ValueError within a group, for an operation that cannot wait for the group's end."""
        if self._groups.current is not None:
            raise ValueError(f"group: {operation} cannot be part of a group; call it outside")

    def _posted(self, call: Call, post: Callable[[Shared], Post]) -> Work | None:
        """An operation that each rank posts before it continues; None if the arrays or the ranks do not allow this."""
        shared, b, progress = self.transports.shared, call.arrays[0], self._queue.progress
        if self._recorder.checked or progress.on_thread or shared is None or not shared.posts.takes(b.flat):
            return None
        if call.algorithm not in ("auto", "shared"):
            return None
        if shared.posts.are_many:
            progress.drain()
        entry = self._note(call.operation, b.flat.size, b.dtype.name, call.op, call.root, "shared")
        with entry.failing():
            posted = Posted(post(shared), entry)

        def operation() -> Any:
            posted.finish()
            return call.arrays[-1].result()

        return self._queue.post(operation, posted)

    def _choose(self, call: Call, nbytes: int, memory: str) -> str:
        """The algorithm. ValueError if the caller's algorithm is unknown or cannot work."""
        if call.operation in ("gather", "scatter"):
            nbytes *= self.size  # here a rank knows only its own part
        if call.sizes_differ:
            nbytes = _LONG
        chosen = self.transports.selector.choose(
            call.operation, call.algorithm, dtype=call.arrays[0].dtype, nbytes=nbytes, memory=memory, op=call.op
        )
        # MPI's displacements are C ints, and whether they suffice depends on the rank.
        is_limited = call.sizes_differ and call.algorithm == "auto" and chosen == "mpi"
        return "pairwise" if is_limited else chosen

    def begin(self, call: Call) -> Entry:
        """Choose the algorithm, and enter the operation in the flight record; in checked mode compare it between the ranks."""
        if self._queue.must_flush():
            self._queue.flush()
        b = call.arrays[0]
        size, name = b.flat.size, b.dtype.name
        where = self.transports.memory_of(call.operation, b.flat)
        if not self._recorder.checked:
            chosen = self._choose(call, b.flat.nbytes, where)
            return self._note(call.operation, size, name, call.op, call.root, chosen)
        options = {
            "op": call.op,
            "root": call.root,
            "counts": call.counts and tuple(call.counts),
            "algorithm": call.algorithm,
            "accumulate": call.accumulate,
            "async_op": call.async_op or None,
        }
        said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        memory = self.transports.memory
        place = (
            memory.place(b.flat)
            if memory is not None
            else "private memory"
            if where == "private"
            else "`shared` memory"
        )
        words = f"{call.operation}({size} x {name}, {said}, in {place})"
        if call.sizes_differ:
            words = f"{call.operation}(parts of {name}, {said})"
        entry = self._recorder.enter(call.operation, words, call.root, call.op, size, name)
        with entry.failing():
            entry.by(self._choose(call, b.flat.nbytes, where))
        return entry

    # Plans

    def repeat(self, x: Any, out: Any, call: Hashable) -> Hashable | Literal[Repeated.DONE]:
        """Make `call`, an operation and its options, again on these arrays. DONE if there is a plan of this call.

        Otherwise the key for `keep_plan`, or None if this call can have no plan.
        """
        if self._groups.current is not None or not self._keeps_plans or self._queue.must_flush():
            return None
        where = key_of(x)
        also = where if out is None else key_of(out)
        if where is None or also is None:
            return None
        key = (call, where, also)
        try:
            plan = self._find_plan(key)
        except TypeError:  # an argument is not hashable: the checks will name it
            return None
        if plan is None:
            return key
        entry = self._note(*plan.entered)
        try:
            plan.call(*plan.arguments)
        except BaseException as error:
            entry.fail(error)
            raise
        entry.leave()  # instead of a `with`, which takes 0.2 us
        return DONE

    def keep_plan(self, key: Hashable, call: Call, entry: Entry, *arguments: Any) -> None:
        """Keep the plan of a call that was carried out on `arguments`, if its transport makes plans.

        Arrays in GPU memory have no plan: `arguments` are then copies in host memory, which only this call has made and uses.
        """
        if key is None or any(b.device is not None for b in call.arrays):
            return
        planner = self.transports.planner(entry.algorithm)
        if planner is not None:
            flats = [array for array in arguments if isinstance(array, np.ndarray)]
            if flats[0].dtype.kind == "c":
                return  # the conjugate view of a torch tensor, which is an error, has the address of the tensor
            if all(flat.size for flat in flats):
                made = planner.plan(entry.name, *arguments)
                if made is not None:
                    self._plans.keep(key, Plan(made[0], made[1], entry.arguments))
