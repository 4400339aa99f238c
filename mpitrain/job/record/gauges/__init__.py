"""Clocks of a step, memory by kind, and the hardware of a rank and its node."""
