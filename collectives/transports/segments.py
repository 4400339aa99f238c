"""The length of the segments into which the executor cuts messages, and the setting that MPI needs for them before it starts.

While a rank adds one segment, the next ones arrive. Open MPI sends a message over TCP at once if it is "eager": by default up to
64 KiB. For a longer message the receiver first confirms that it is ready. The confirmation uses the connection of the receiver's own
segments and waits behind them, so two ranks that exchange sums delay each other: measured on two hosts at 1 Gbit/s, a reduce-scatter
of 64 MiB reached 0.55 of the link's bandwidth, and 0.95 with eager segments. Other networks, and ranks on one node, ignore this
setting.
"""

SEGMENT_BYTES = 1 << 19
EAGER_BYTES = SEGMENT_BYTES + (4 << 10)  # with MPI's own header
