"""The order of events in a step. Begin with step.py; the other modules are its parts."""
