"""What a step takes in addition to the work of kernels and links: Python, torch, and ranks that wait for each other."""

from mpitrain.job.record.machine.constants import Overhead, Overheads
from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import RankLayout

NONE: Overhead = (0.0, 0.0, 0.0)


def overhead_of(machine: Machine, layout: RankLayout) -> Overhead:
    """Seconds of a step, of a micro-batch (of a pipeline: on one stage), and of a block in a micro-batch, forward and backward."""
    of = machine.overheads
    if of is None:
        return NONE
    base = of.data
    if layout.pipeline > 1:
        base = of.stages or base
    elif layout.tensor > 1:
        base = _of_tensor(of, layout)
    step, micro, block = base
    if layout.pipeline > 1 and layout.tensor > 1:
        block += _more(_of_tensor(of, layout), of.data)[2]
    if layout.zero == 3 and not layout.resident:
        in_step, in_micro, in_block = _more(of.gathered, of.data)
        step, micro, block = step + in_step, micro + in_micro / layout.stages_per_rank, block + in_block
    return step, micro, block


def again_overhead_s(machine: Machine, layout: RankLayout) -> float:
    """Seconds of a block whose forward, or attention alone, is computed again.

    Half of a block's exchanges are those of the forward, and half of those are around attention.
    """
    of = machine.overheads
    if of is None or layout.recompute == "none":
        return 0.0
    if layout.tensor == 1:
        return of.block_again_s
    share = 1 / 2 if layout.recompute == "block" else 1 / 4
    return of.block_again_s + share * _more(_of_tensor(of, layout), of.data)[2]


def _of_tensor(of: Overheads, layout: RankLayout) -> Overhead:
    return (of.sequence if layout.sequence else of.tensor) or of.data


def _more(of: Overhead, than: Overhead) -> Overhead:
    """The differences, of which noise makes none negative."""
    step, micro, block = (max(a - b, 0.0) for a, b in zip(of, than, strict=True))
    return step, micro, block
