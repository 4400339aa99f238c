"""How long the segments are into which the executor cuts messages, and what MPI must know of them before it starts.

While a rank adds one segment, the next ones arrive. Open MPI sends a message over TCP at once if it is "eager": by default up to
64 KiB. For a longer message the receiver has to confirm that it is ready. The confirmation goes over the connection that carries the
receiver's own segments, behind them, so two ranks that exchange sums wait for each other: measured on two hosts at 1 Gbit/s, a
reduce-scatter of 64 MiB got 0.55 of the link, and 0.95 with eager segments. Other networks, and ranks on one node, do not read this
setting.
"""

SEGMENT_BYTES = 1 << 19
EAGER_BYTES = SEGMENT_BYTES + (4 << 10)  # with MPI's own header
