"""`measured`: all constants of the cluster at hand."""

from time import perf_counter

import torch

from collectives import Communicator
from mpitrain.job.record.machine.machine import from_text
from mpitrain.job.record.machine.memory import node_bytes, own_bytes
from mpitrain.tools.plan.measuring.constants import MeasuredConstant, Sections, to_toml
from mpitrain.tools.plan.measuring.kernels import kernels
from mpitrain.tools.plan.measuring.links import links
from mpitrain.tools.plan.measuring.overheads import overheads
from mpitrain.tools.plan.measuring.rig import Rig
from mpitrain.torch_glue.heap import keep_freed_memory

ORDER = (
    "name", "flops", "memory", "memory_bandwidth", "ranks_per_node", "node_bandwidth", "bandwidth", "node_latency_s", "latency_s",
    "launch_s", "element_bytes", "shares_memory",
)  # fmt: skip
"""Of the keys before the sections."""


def measured(comm: Communicator, device: torch.device, *, name: str = "measured", seconds: float = 40.0) -> Sections:
    """The constants of a machine file. Collective: all ranks get the same values. `device`: of this rank.

    CPUs are measured in fp32, GPUs in bf16. `seconds`: of the measurement, which takes longer if five rounds do.
    ValueError on all ranks if the nodes have different numbers of ranks.
    """
    place = comm.placement
    if place.smallest_node != place.largest_node:
        with comm.together():
            raise ValueError(
                f"plan --measure: expected the same number of ranks on each node, got {place.smallest_node} to {place.largest_node}"
            )
    keep_freed_memory()  # as a sharded model does
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    rig = Rig(comm, device, dtype)
    used = max(comm.all_gather_object(own_bytes()))
    begun = perf_counter()
    computed = kernels(rig, begun + 0.6 * seconds)
    sent = links(rig, begun + 0.8 * seconds, float(computed[""]["memory_bandwidth"].value))  # type: ignore[arg-type]
    if is_cpu:
        of_node, on_node = min(comm.all_gather_object(node_bytes())), comm.node.size
        memory = MeasuredConstant(
            of_node // on_node,
            f"The node's memory, or its cgroup's limit, {of_node:,} bytes, by {on_node} ranks of a node.",
        )
    else:
        of_rank = min(comm.all_gather_object(torch.cuda.mem_get_info(device)[1]))
        memory = MeasuredConstant(of_rank, "Of the GPU.")
        used = max(
            comm.all_gather_object(of_rank - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device))
        )
    top = {
        "name": MeasuredConstant(name, "How a plan calls this machine."),
        "memory": memory,
        "ranks_per_node": MeasuredConstant(
            comm.node.size, f"As in the job of the measurement: {comm.size} ranks, {comm.num_nodes} nodes."
        ),
        "element_bytes": MeasuredConstant(dtype.itemsize, "Of a number in forward and backward."),
        "shares_memory": MeasuredConstant(is_cpu, "Whether the ranks of a node can hold full parameters together."),
        **computed[""],
        **sent[""],
    }
    share = min(max(1 - used / float(memory.value), 0.01), 1.0)  # type: ignore[arg-type]
    rest = MeasuredConstant(share, "All but what the process has before a model is made, the rank with most.")
    sections = {
        "": {key: top[key] for key in ORDER},
        "efficiency": computed["efficiency"] | sent["efficiency"] | {"memory": rest},
        "kernels": computed["kernels"],
        "links": sent["links"],
    }
    if is_cpu:  # a GPU computes while Python goes on
        sections["overheads"] = overheads(rig, from_text(to_toml(sections, ""), name), begun + seconds)
    return sections
