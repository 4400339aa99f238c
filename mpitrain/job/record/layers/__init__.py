"""Figures of a model by layer, on requested steps."""
