"""The heading of a run: ranks, model, data, and what the ranks send each other."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from collectives import Communicator
from mpitrain.job.config import Config, ParallelConfig

if TYPE_CHECKING:
    import torch

    from mpitrain.models import LanguageModel

_EXACT = "fp32"


def heading(
    config: Config,
    used: ParallelConfig,
    comm: Communicator,
    model: "LanguageModel",
    *,
    device: "torch.device",
    threads: int,
    num_idle: int,
    data: object,
    about_data: Iterable[str],
    beginning: str,
) -> str:
    """The lines at the start of a run.

    Args:
        config: the settings.
        used: with the formats that are used in place of "auto".
        comm: the ranks.
        model: of this rank.
        device: of this rank.
        threads: of each rank.
        num_idle: the ranks that have no work.
        data: the data; its text describes them.
        about_data: lines about the data and the programs that read and tokenize.
        beginning: the last line: the run's folder, and where the run begins.
    """
    from mpitrain.models import num_parameters

    on_gpus = device.type == "cuda"
    where = "GPU" if on_gpus else f"CPU, {threads} thread{'s' * (threads > 1)} each"
    held = sum(p.numel() for p in model.parameters())
    messages = about_messages(config, used, num_nodes=comm.num_nodes, on_gpus=on_gpus, threads=threads)
    idle = f"; {num_idle} more without work, because they do not fit the layout" if num_idle else ""
    return (
        f"{comm.size} rank{'s' * (comm.size > 1)} on {comm.num_nodes} node{'s' * (comm.num_nodes > 1)}, {where}{idle}\n"
        f"model {config.model.family} {config.model.size}: {num_parameters(model.config) / 1e6:.2f} M parameters, "
        f"{held / 1e6:.2f} M on rank 0\n"
        f"data: {data}\n" + "".join(f"{line}\n" for line in (*messages, *about_data)) + beginning
    )


def about_messages(
    config: Config, used: ParallelConfig, *, num_nodes: int, on_gpus: bool, threads: int = 1
) -> list[str]:
    """A line for each of formats, compression, copies and slices that the settings ask for.

    `used`: the settings with the formats that are used in place of "auto". `threads`: of each rank.
    """
    asked = config.parallel
    lines = [_wires(asked, used, num_nodes=num_nodes, on_gpus=on_gpus)]
    if not config.train.eval_only:
        lines += [_copies(asked), _compression(asked), _slices(config, 1 if on_gpus else threads)]
    return [line for line in lines if line]


def _wires(asked: ParallelConfig, used: ParallelConfig, *, num_nodes: int, on_gpus: bool) -> str:
    if num_nodes == 1:
        from mpitrain.sharding.ranks import about_one_node

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
    data = "data " * (config.parallel.pipeline * tensor > 1)  # the ranks with different data
    same = f"{count} slices: the same bits at 1 to {count} {data}ranks"
    kept, others = [], []
    if tensor > 1:  # divides sums inside a layer
        kept.append(f"parallel.tensor {tensor}")
        others += ["parallel.tensor", "parallel.sequence"]
    if threads > 1:  # may divide a kernel's sums
        kept.append(f"{threads} threads each")
        others.append("number of threads")
    return f"{same} with {' and '.join(kept)}; another {' or '.join(others)} changes bits" if kept else same
