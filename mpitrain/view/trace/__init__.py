"""Traces, drawn."""
