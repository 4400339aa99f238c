"""Looks at ranks of this node that give no answer: their processes, their notes on the board, and their stacks."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from collectives.diagnosis.hangs.node import board, process
from collectives.diagnosis.hangs.node.board import Board, Slot

_FRESH_S = (
    1.5  # a rank that has written its note within this time has a monitor that runs, so its answer may still come
)
_STACKS_S = 0.6  # the longest wait for stacks
_QUIET_S = 0.06  # stacks that have not grown for this time are complete
_NUM_STACK_LINES = 40
_INDENT = " " * 6


class Look(NamedTuple):
    """What is known about a rank without its answer. `is_final`: a longer wait for its answer is of no use."""

    words: str
    is_final: bool


def look(on: Board, ranks: Sequence[int]) -> dict[int, Look]:
    """Look at ranks of this node. Takes at most `_STACKS_S`, in which they write their stacks."""
    slots = {rank: on.read(rank) for rank in ranks}
    known = {rank: slot for rank, slot in slots.items() if slot is not None and on.is_current(slot)}
    stale = [rank for rank, slot in known.items() if board.age(slot) > _FRESH_S]
    # Before the signal: it may end a sleep in the kernel.
    words = {rank: _about(slot) for rank, slot in known.items()}
    stacks = _stacks(on, [rank for rank in stale if not _is_stopped(known[rank])])
    return {
        rank: Look(words[rank] + _shown(stacks.get(rank, "")), rank in stale) if rank in known else Look("", False)
        for rank in ranks
    }


def _is_stopped(slot: Slot) -> bool:
    return process.state(slot.pid)[:1] in ("T", "t")


def _about(slot: Slot) -> str:
    """The state of a process, and its last note."""
    state, where, age_s = process.state(slot.pid), process.where(slot.pid), board.age(slot)
    words = f"state of its process: {state}{f' in {where}' if where else ''}"
    if _is_stopped(slot):
        words += "; a process that is stopped goes on at SIGCONT"
    elif age_s > _FRESH_S:
        words += "; its Python has not run since its last record: a thread holds the GIL, or is stuck in the kernel"
    return words + last_record(slot)


def last_record(slot: Slot) -> str:
    """The last note of a rank, as lines."""
    if not slot.noted:
        return ""
    return "".join(
        f"\n{_INDENT}{line}" for line in (f"its last record, {board.age(slot):.1f} s old:", *slot.note.splitlines())
    )


def _stacks(on: Board, ranks: Sequence[int]) -> dict[int, str]:
    """The stacks that ranks write at a signal."""
    asked = {rank: after for rank in ranks if (after := on.ask_for_stacks(rank)) is not None}
    found: dict[int, bytes] = dict.fromkeys(asked, b"")
    end = time.monotonic() + _STACKS_S
    while asked and time.monotonic() < end:
        time.sleep(_QUIET_S)
        now = {rank: on.stacks(rank, after) for rank, after in asked.items()}
        if all(now.values()) and now == found:
            break
        found = now
    return {rank: text.decode(errors="replace") for rank, text in found.items()}


def _shown(stacks: str) -> str:
    if not stacks:
        return ""
    lines = stacks.splitlines()
    more = [f"... ({len(lines) - _NUM_STACK_LINES} more lines)"] if len(lines) > _NUM_STACK_LINES else []
    shown = ("its stacks, as faulthandler wrote them:", *lines[:_NUM_STACK_LINES], *more)
    return "".join(f"\n{_INDENT}{line}" for line in shown)
