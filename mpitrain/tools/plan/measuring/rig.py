"""The contestants of the measurement, and the time that they get."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from collectives import Communicator
from collectives.bench.kit.turns import Contestant, Seconds, Series, drawn_order, take_turns

LEAST, MOST = 5, 100  # rounds
K = TypeVar("K", bound=Hashable)


class Rig(NamedTuple):
    """Where the measurement runs. `dtype`: of forward and backward."""

    comm: Communicator
    device: torch.device
    dtype: torch.dtype

    def wait(self) -> None:
        """Until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The seconds of `call`, with the work that it leaves to the device, and its result."""
        self.wait()
        begun = time.perf_counter()
        result = call()
        self.wait()
        return time.perf_counter() - begun, result


class Calls(NamedTuple):
    """A contestant: `times` calls one after the other, which all ranks begin together. "call": the mean seconds of one.

    `prepare`: is called before them, and is not timed.
    """

    rig: Rig
    call: Callable[[], Any]
    times: int = 1
    prepare: Callable[[], Any] | None = None

    def turn(self, round_: int) -> Seconds:
        def all_calls() -> None:
            for _ in range(self.times):
                self.call()

        if self.prepare is not None:
            self.prepare()
        self.rig.comm.mpi.Barrier()
        return {"call": self.rig.timed(all_calls)[0] / self.times}


class ForwardBackward(NamedTuple):
    """A contestant: "forward" and "backward" of a function of `inputs`, of which each has a gradient."""

    rig: Rig
    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]

    def turn(self, round_: int) -> Seconds:
        self.rig.comm.mpi.Barrier()
        forward, out = self.rig.timed(lambda: self.function(*self.inputs))
        grad = torch.ones_like(out)
        self.rig.comm.mpi.Barrier()
        # Gradients are made anew, as those of activations are.
        backward, _ = self.rig.timed(lambda: torch.autograd.grad(out, self.inputs, grad))
        return {"forward": forward, "backward": backward}


def take_turns_within(comm: Communicator, contestants: Mapping[K, Contestant], until: float) -> Series[K]:
    """This rank's seconds in as many rounds as end until `perf_counter` is `until`, at least LEAST. Collective.

    A first round does not count. As `take_turns` of the kit, which has a fixed number of rounds.
    """
    take_turns(contestants, rounds=1)  # touches memory, and loads libraries
    names = list(contestants)
    taken: dict[tuple[K, str], list[float]] = {}
    for round_ in range(MOST):
        if comm.broadcast_object(round_ >= LEAST and time.perf_counter() > until):
            break
        for i in drawn_order(round_, len(names)):
            for action, value in contestants[names[i]].turn(round_).items():
                taken.setdefault((names[i], action), []).append(value)
    return {key: np.array(values) for key, values in taken.items()}
