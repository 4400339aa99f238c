"""Whole weights in and out: unsharded state dicts, and safetensors files with the names of the plain model."""
