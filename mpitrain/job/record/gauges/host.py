"""The processor and the network of a rank's node, by psutil (the optional extra `gauges`)."""

import os
import time
from pathlib import Path

try:
    import psutil
except ImportError:  # an optional package: then there are no figures of the host
    psutil = None


_LEAST_S = 0.2
"""Between two samples."""


class HostGauges:
    """The load of the cores that this rank may run on, and the bytes that the node's network cards move, between two samples.

    A busy neighbour shows in the load: it is that of all processes on these cores. The ranks of a node have the same bytes. Traffic
    within the node (`lo`, bridges, virtual cards) does not count, and neither do the messages of InfiniBand verbs, which pass by the
    system.
    """

    def __init__(self) -> None:
        self._time = time.perf_counter()
        self._bytes = _network_bytes()
        if psutil is not None:
            psutil.cpu_percent(percpu=True)  # of the time since the call before

    def sample(self) -> dict[str, float]:
        """cpu_percent (100: all of the cores compute), net_sent_bytes_per_s, net_received_bytes_per_s; nothing without psutil.

        Nothing either just after the last sample: the system counts in steps of 10 ms.
        """
        if psutil is None:
            return {}
        now, total = time.perf_counter(), _network_bytes()
        span_s = now - self._time
        if span_s < _LEAST_S:
            return {}
        sent, received = ((after - before) / span_s for before, after in zip(self._bytes, total, strict=True))
        self._time, self._bytes = now, total
        loads = psutil.cpu_percent(percpu=True)
        own = [loads[core] for core in os.sched_getaffinity(0) if core < len(loads)]
        figures = {"net_sent_bytes_per_s": sent, "net_received_bytes_per_s": received}
        return figures | ({"cpu_percent": sum(own) / len(own)} if own else {})


def _network_bytes() -> tuple[int, int]:
    """The bytes that the cards have sent and received. Without a physical card, as in some containers, those of all but `lo`."""
    if psutil is None:
        return 0, 0
    cards = {name: count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"}
    physical = [count for name, count in cards.items() if Path("/sys/class/net", name, "device").exists()]
    counted = physical or list(cards.values())
    return sum(count.bytes_sent for count in counted), sum(count.bytes_recv for count in counted)
