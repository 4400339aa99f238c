"""The lines in a run's heading about what its ranks send each other: formats, compression, copies and local steps, slices."""

from mpitrain.config import Config, ParallelConfig
from mpitrain.sharding.unit.wires import about_one_node

_EXACT = "fp32"


def about_messages(
    config: Config, used: ParallelConfig, *, num_nodes: int, on_gpus: bool, threads: int = 1
) -> list[str]:
    """A line for each of them that the settings ask for. `used`: the settings with the formats that are used in place of "auto".
    `threads`: of each rank.
    """
    asked = config.parallel
    lines = [_wires(asked, used, num_nodes=num_nodes, on_gpus=on_gpus)]
    if not config.train.eval_only:
        lines += [_copies(asked), _compression(asked), _slices(config, 1 if on_gpus else threads)]
    return [line for line in lines if line]


def _wires(asked: ParallelConfig, used: ParallelConfig, *, num_nodes: int, on_gpus: bool) -> str:
    if num_nodes == 1:
        return about_one_node(asked.wire, asked.wire_weights)
    if (asked.wire, asked.wire_weights) == (_EXACT, _EXACT):
        return ""
    gradients, weights = (
        f"{chosen} (chosen by auto)" if setting == "auto" else chosen
        for setting, chosen in ((asked.wire, used.wire), (asked.wire_weights, used.wire_weights))
    )
    encodes = (used.wire, used.wire_weights) != (_EXACT, _EXACT)
    gpus = "; what NCCL or CUDA-aware MPI sends is not encoded" if on_gpus and encodes else ""
    return f"between nodes: gradients as {gradients}, weights as {weights}{gpus}"


def _copies(parallel: ParallelConfig) -> str:
    if parallel.copies == 1 and not parallel.local_steps:
        return ""
    copies = f"{parallel.copies} cop{'ies' if parallel.copies > 1 else 'y'} of the model"
    if not parallel.local_steps:
        return copies
    how = f"{parallel.local_steps} local steps, then an outer step ({parallel.outer})"
    return f"{copies}: {how}{_exact_steps(parallel)}"


def _compression(parallel: ParallelConfig) -> str:
    match parallel.compress:
        case "power_sgd":
            how = f"power_sgd of rank {parallel.compress_rank}"
        case "top_k":
            how = f"top_k of {100 * parallel.compress_share:g} % of the elements"
        case _:
            return ""
    feedback = "" if parallel.compress_feedback else ", without feedback"
    return f"gradients between copies: {how}{feedback}{_exact_steps(parallel)}"


def _exact_steps(parallel: ParallelConfig) -> str:
    number = parallel.exact_steps
    return f", after {number} exact step{'s' * (number > 1)}" if number else ""


def _slices(config: Config, threads: int) -> str:
    """How far the bits of a run with slices are the same."""
    count, tensor = config.train.slices, config.parallel.tensor
    if not count:
        return ""
    same = f"{count} slices: the same bits at {tensor} to {count * config.parallel.pipeline * tensor} ranks"
    kept, others = [], []
    if tensor > 1:  # divides sums inside a layer
        kept.append(f"parallel.tensor {tensor}")
        others += ["parallel.tensor", "parallel.sequence"]
    if threads > 1:  # may divide a kernel's sums
        kept.append(f"{threads} threads each")
        others.append("number of threads")
    return f"{same} with {' and '.join(kept)}; another {' or '.join(others)} changes bits" if kept else same
