"""Faults that stop no rank by themselves: NaN, spikes, copies that differ, and flipped bits.

`Health` in `health.py` is what a training loop calls. Pure parts: `pieces.py` and `verdict.py` (copies), `spikes.py`.
`checksums.py` reads tensors, `holdings.py` says what each rank holds, `replicas.py` and `resting.py` compare it with other ranks and
with itself, `rewind.py` goes back to a good state, and `reports.py` writes lines and events.
"""

from mpitrain.job.health.health import Bad, DesyncError, FlippedBitError, Health
from mpitrain.job.health.reports import Reports
from mpitrain.job.health.rewind import GoodStates, InitialState, StatesOnDisk

__all__ = [
    "Bad",
    "DesyncError",
    "FlippedBitError",
    "GoodStates",
    "Health",
    "InitialState",
    "Reports",
    "StatesOnDisk",
]
