"""What ranks say of themselves, made by hand: the defaults of an operation that a rank waits in, and of a rank.

`leave_all`: after a test that has entered operations.
"""

from typing import Any

from collectives.diagnosis import record
from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.record import shown_ranks


def waiting(key: str = "A", sequence: int = 5, name: str = "all_reduce", ranks: Any = (0, 1), **more: Any) -> Waiting:
    fields: dict[str, Any] = {
        "number": 1, "key": key, "label": f"{key} ({shown_ranks(ranks)})", "awaited": list(ranks), "sequence": sequence, "counter": key,
        "call": f"#{sequence} {name}", "algorithm": "", "age": 3.0, "site": "a.py:3 in f", "thread": 1, "comparing": False,
        "dispensable": False, "doing": "",
    }  # fmt: skip
    return Waiting(**{**fields, **more})  # type: ignore[typeddict-item]


def state(*operations: Waiting, **more: Any) -> State:
    fields: dict[str, Any] = {
        "waiting": list(operations), "standing": "b.py:4 in g", "doing": "", "ended": "", "last": {}, "counts": {}, "serving": {},
        "main": 1, "issued": {}, "device": "", "device_age": 0.0,
    }  # fmt: skip
    more["counts"] = {each["key"]: each["sequence"] for each in operations} | more.get("counts", {})
    return State(**{**fields, **more})  # type: ignore[typeddict-item]


def leave_all() -> None:
    """No operation of this process goes on."""
    for entry in [*record._slots, *record._overtaken]:
        if entry is not None and entry.state == record.BEGUN:
            entry.leave()
