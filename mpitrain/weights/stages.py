"""The tensors of a checkpoint of a model in stages: each rank has those of its own stages."""

from collections.abc import Container, Mapping
from itertools import chain
from typing import Any

import numpy as np

import ckpt
from collectives import Communicator
from mpitrain.weights.held import of_one_rank


def with_other_stages(
    tensors: Mapping[str, Any], stages: Communicator, comm: Communicator, *, of_first: Container[str]
) -> dict[str, Any]:
    """The tensors for a save of all stages: this rank has no box of a tensor that it lacks. Collective over `comm`.

    Of a tensor that some ranks have whole, such as the optimizer's number of steps, the first of them has the only box. `of_first`: the
    names of tensors of which this is so also if all ranks have them. `stages`: the ranks of this rank's pipeline.
    """
    names = list(dict.fromkeys(chain(*stages.all_gather_object(list(tensors)))))
    has = np.array([name in tensors for name in names])
    count = comm.all_reduce(has.astype(np.int64))
    first = comm.all_reduce(np.where(has, comm.rank, comm.size), "min")
    made: dict[str, Any] = {}
    for at, name in enumerate(names):
        value = made[name] = tensors.get(name, [])
        if not has[at] or isinstance(value, list | tuple | ckpt.Shard):
            continue
        if count[at] < comm.size or name in of_first:
            made[name] = of_one_rank(value, is_mine=first[at] == comm.rank)
    return made
