"""The order of events in a step: forward, backward, reductions, fences, gathers."""
