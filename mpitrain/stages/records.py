"""When the actions of steps began and ended."""

from dataclasses import dataclass, field


@dataclass
class Record:
    """One step of one rank. Times are those of the rank's clock, in seconds.

    start: when the ranks had agreed on the step. begun, ended: of each action of the program, without its wait for a message. On a GPU
    these are the times of the host, which only starts kernels.
    """

    start: float
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    stop: float = 0.0

    def add(self, begun: float, ended: float) -> None:
        """Note an action that has ended."""
        self.begun.append(begun)
        self.ended.append(ended)
