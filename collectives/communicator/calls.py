"""What the ranks of a Communicator do together: the collectives, messages between two ranks, control, groups of these, and arrays.

The methods name and explain the arguments. operations.py, messages.py, control.py, coalescing.py and allocation.py do the work. The
docstring of communicator.py says what holds for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from collectives.communicator import coalescing
from collectives.communicator.allocation import Allocation
from collectives.communicator.control import Control
from collectives.communicator.group import Groups
from collectives.communicator.messages import Messages
from collectives.communicator.operations import Collectives
from collectives.diagnosis.recorder import Recorder
from collectives.progress.work import Work
from collectives.transports.runs import Runs

if TYPE_CHECKING:  # importing it starts MPI
    from collectives.transports.gpu.device import Devices


class CommunicatorCalls:
    """The methods of a Communicator that move data between its ranks, or order them. It sets these attributes when it is made."""

    size: int
    num_nodes: int
    _recorder: Recorder
    _groups: Groups
    _collectives: Collectives
    _messages: Messages
    _control: Control
    _allocation: Allocation
    _devices: "Devices"

    # Collectives

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank's `x` becomes the reduction of all ranks' `x`. In place; returns `x`, or a Work with `async_op`.

        `op`: sum, avg, prod, max, min. All ranks get the same bits. fp16 and bf16 are added in fp32. Algorithms in node memory and
        "mpi" round once; the other algorithms round at every hop, unless `accumulate="fp32"` makes them send fp32.
        """
        return self._collectives.all_reduce(x, op, algorithm, accumulate, async_op)

    def all_gather(
        self, out: Any, x: Any, *, counts: Sequence[int] | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """`out` becomes the concatenation of all ranks' `x` in order of rank. Returns `out`, or a Work with `async_op`.

        `counts`: the number of elements of each rank, if these differ. `x` may be this rank's part of `out`. If `out` is a `shared`
        array of this communicator, each rank only writes its own part, once.
        """
        return self._collectives.all_gather(out, x, counts, algorithm, async_op)

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`out` becomes this rank's part of the reduction of all ranks' `x`. Returns `out`, or a Work with `async_op`.

        `counts`: the number of elements of each rank's part, if these differ. `out` may be this rank's part of `x`; otherwise `x`
        does not change. `x` may be written again after the call. `op`, `accumulate`: as in `all_reduce`.
        """
        return self._collectives.reduce_scatter(out, x, op, counts, algorithm, accumulate, async_op)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the root's. In place; returns `x`, or a Work with `async_op`."""
        return self._collectives.broadcast(x, root, algorithm, async_op)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The root's `x` becomes the reduction of all ranks' `x`; the other ranks' `x` do not change. Returns `x`, or a Work.

        `op`, `accumulate`: as in `all_reduce`.
        """
        return self._collectives.reduce(x, root, op, algorithm, accumulate, async_op)

    def gather(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `out` becomes the concatenation of all ranks' `x`; the other ranks pass None as `out`. Returns `out`, or a Work.

        The root's `x` may be its own part of `out`.
        """
        return self._collectives.gather(out, x, root, algorithm, async_op)

    def scatter(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `out` becomes its part of the root's `x`; the other ranks pass None as `x`. Returns `out`, or a Work.

        The root's `out` may be its own part of `x`.
        """
        return self._collectives.scatter(out, x, root, algorithm, async_op)

    def all_to_all(
        self,
        out: Any,
        x: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Any:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. Returns `out`, or a Work with `async_op`.

        `send_counts`, `recv_counts`: the number of elements of each part of `x` and of `out`, if these differ; a part may be empty.
        All ranks pass both or neither. `recv_counts[i]` is rank i's `send_counts` for this rank.
        """
        return self._collectives.all_to_all(out, x, send_counts, recv_counts, algorithm, async_op)

    def reduce_by(
        self,
        x: Any,
        reduce: Callable[[list[Any]], object],
        *,
        bounds: Sequence[tuple[int, int]],
        runs: Runs | None = None,
    ) -> Work:
        """A reduce-scatter with the caller's own reduction: `reduce` gets this rank's part of every rank's `x`, in order of rank.

        `bounds`: (begin, end) of each rank's part of the elements of `x`, the same on all ranks. Parts may overlap or leave elements
        out. `reduce` is called once, on this rank or its progress thread, with 1-D arrays: tensors for a torch tensor, CuPy arrays
        for another array in GPU memory, else NumPy arrays. It only reads them, only during the call, and calls no collective. `x` must
        not change before the Work that is returned has ended. Its `wait()` returns `x`, or raises an error of `reduce`.

        `runs`: with it `reduce` gets one array for each run of ranks, see `Runs`. A node then sends one array for each of its runs to
        the owner of a part on another node, not one for each rank. If `x` is in node memory (`empty`) and all ranks are on one node,
        `reduce` and `combine` read the elements where they are. Arrays in GPU memory are sent to the owner before they are combined.

        ValueError or TypeError if `bounds` or `runs` do not fit `x` or the ranks, and within a group.
        """
        return self._collectives.reduce_by(x, reduce, bounds, runs)

    # Messages between two ranks

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be written again. ValueError if `peer` is this rank and no `irecv` waits."""
        self._messages.send(x, peer, tag)

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive the next message of rank `peer` with `tag` into `x`; returns `x`. ValueError if the message has another size."""
        return self._messages.recv(x, peer, tag)

    def isend(self, x: Any, peer: int, tag: int = 0) -> Work:
        """`send` as a Work: `x` may be written again after its `wait()`."""
        return self._messages.isend(x, peer, tag)

    def irecv(self, x: Any, peer: int, tag: int = 0) -> Work:
        """`recv` as a Work, whose `wait()` returns `x`, or raises ValueError if the message has another size."""
        return self._messages.irecv(x, peer, tag)

    # Control, never data

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when every rank has called `barrier`. With `async_op` return a Work at once, whose `wait()` returns then.

        Within a node the other ranks see this rank's call even if this rank never waits for its Work.
        """
        if async_op:
            return self._control.issue_barrier()
        self._control.barrier()
        return None

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The root's `obj` on every rank. It is pickled: for small control messages, never for data."""
        return self._control.broadcast_object(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """All ranks' `obj` in order of rank. They are pickled: for small control messages, never for data."""
        return self._control.all_gather_object(obj)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """`with comm.together("reading the data"):` - an error in the block on any rank is raised on every rank.

        The error has the same type and text on all ranks and names the ranks that failed; `collectives.on_all_ranks(error)` is true
        for it. The block must not contain a collective.
        """
        return self._control.together(doing)

    def expect(self, rank: int, tag: int, wait: Callable[[], object]) -> None:
        """Call `wait`, which waits for `rank` by other means than MPI: in the flight record, and limited by the deadline."""
        with self._recorder.log.enter_pair("recv", rank, tag):
            wait()  # here, because the record drops an operation whose thread is outside of this package

    # Several operations

    @contextmanager
    def group(self) -> Iterator[None]:
        """The operations within `with comm.group():` are carried out together at its end. All ranks issue the same collectives.

        All `send` and `recv` of the block run at the same time, so that ranks may exchange messages in any order. NCCL carries those
        of tag 0 if it connects the ranks; sender and receiver must then both use a group (see transports/gpu/device_messages.py).
        Messages start before the collectives of the block and end after them, whatever their order in the block. If a collective uses
        the same array in host memory, a send takes its contents from before the collectives, and a receive overwrites their result.
        Consecutive all-reduces, broadcasts or reduces of small arrays with the same arguments are packed into one, with the results of
        separate calls; if arrays overlap, they overlap on all ranks. The arrays hold the results after the block. If an exception
        leaves the block, no operation runs. A nested group of the same communicator joins the outer one. ValueError for JAX arrays.
        """
        if (outer := self._groups.current) is not None:
            with outer.within():
                yield
            return
        group = self._groups.open()
        try:
            yield
        finally:
            self._groups.close()
        coalescing.carry_out(group, self._collectives, self._messages, self._devices)

    # Arrays in node memory

    def empty(self, shape: int | Sequence[int], dtype: object, *, or_anonymous: bool = False) -> Any:
        """An array of this rank that the other ranks of the node can read: reductions on it move each element once. Collective.

        It is a torch tensor for a torch dtype, else a NumPy array, filled with zeros. All ranks pass the same shape and dtype. On a
        communicator of several nodes it is private memory. OSError on all ranks if the node's shared memory is full. `or_anonymous`:
        then it is memory that no folder limits (Linux's memfd), if the ranks see each other's processes.
        """
        return self._allocation.empty(shape, dtype, or_anonymous=or_anonymous)

    def shared(self, shape: int | Sequence[int], dtype: object, *, or_anonymous: bool = False) -> Any:
        """One array of zeros in the same memory on every rank: `comm.node.shared(...)`. Collective.

        It is a torch tensor for a torch dtype, else a NumPy array. The caller orders reads and writes by different ranks, with
        `barrier()`. ValueError on a communicator of several nodes; OSError on all ranks if the node's shared memory is full.
        `or_anonymous`: as of `empty`.
        """
        if self.num_nodes > 1:
            raise ValueError(
                f"shared: these {self.size} ranks are on {self.num_nodes} nodes; call comm.node.shared(...)"
            )
        return self._allocation.shared(shape, dtype, or_anonymous=or_anonymous)
