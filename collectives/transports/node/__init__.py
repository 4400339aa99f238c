"""Transports through node memory."""
