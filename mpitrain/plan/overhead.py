"""What a step takes on a machine besides the work of its kernels and links: Python, torch, and ranks that wait for each other."""

from mpitrain.plan.layout import Layout
from mpitrain.plan.machine import Machine
from mpitrain.plan.measuring.constants import Overhead, Overheads

NONE: Overhead = (0.0, 0.0, 0.0)


def overhead_of(machine: Machine, layout: Layout) -> Overhead:
    """Seconds of a step, of a micro-batch (of a pipeline: on one stage), and of a block in a micro-batch, forward and backward."""
    of = machine.overheads
    if of is None:
        return NONE
    in_tensor = _in_tensor(of, layout)
    if layout.pipeline == 1:
        return in_tensor
    step, micro, block = of.stages or of.data
    return step, micro, block + in_tensor[2] - of.data[2]


def again_overhead_s(machine: Machine, layout: Layout) -> float:
    """Seconds of a block whose forward is computed again, with its exchanges."""
    of = machine.overheads
    if of is None or layout.recompute == "none":
        return 0.0
    in_tensor = _in_tensor(of, layout)
    return of.block_again_s + max(in_tensor[2] - of.data[2], 0.0) / 2 * (layout.tensor > 1)


def _in_tensor(of: Overheads, layout: Layout) -> Overhead:
    """Of a layout without its pipeline."""
    if layout.tensor > 1:
        return (of.sequence if layout.sequence else of.tensor) or of.data
    return of.gathered if layout.zero == 3 and not layout.resident else of.data
