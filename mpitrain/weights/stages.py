"""The tensors of a checkpoint of a model in stages: each rank has those of its own stages."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

import ckpt
from collectives import Communicator


def with_other_stages(tensors: Mapping[str, Any], stages: Communicator, comm: Communicator) -> dict[str, Any]:
    """The tensors for a save of all stages: this rank has no box of a tensor that it lacks. Collective over `comm`.

    Of a tensor that some ranks have whole, such as a buffer or the optimizer's number of steps, the first of them has the only box.
    `stages`: the ranks of this rank's pipeline.
    """
    names = list(dict.fromkeys(chain(*stages.all_gather_object(list(tensors)))))
    has = np.array([name in tensors for name in names])
    count = comm.all_reduce(has.astype(np.int64))
    first = comm.all_reduce(np.where(has, comm.rank, comm.size), "min")
    made: dict[str, Any] = {}
    for at, name in enumerate(names):
        value = made[name] = tensors.get(name, [])
        if not has[at] or count[at] == comm.size or isinstance(value, list | tuple | ckpt.Shard):
            continue
        box = value if first[at] == comm.rank else value.reshape(-1)[:0].reshape((0,) * value.ndim or (0,))
        made[name] = ckpt.Shard(box, value.shape, (0,) * value.ndim)
    return made
