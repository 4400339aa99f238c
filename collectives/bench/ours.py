"""Our own collectives, by one algorithm or by "auto"."""

from collectives.bench.library import Arrays, Call
from collectives.communicator.communicator import Communicator


def our_call(comm: Communicator, operation: str, algorithm: str, arrays: Arrays) -> Call:
    whole, part, other = arrays
    at_root = whole if comm.rank == 0 else None
    return {
        "all_reduce": lambda: comm.all_reduce(whole, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(whole, part, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(whole, algorithm=algorithm),
        "reduce": lambda: comm.reduce(whole, algorithm=algorithm),
        "gather": lambda: comm.gather(at_root, part, algorithm=algorithm),
        "scatter": lambda: comm.scatter(part, at_root, algorithm=algorithm),
        "all_to_all": lambda: comm.all_to_all(other, whole, algorithm=algorithm),
    }[operation]
