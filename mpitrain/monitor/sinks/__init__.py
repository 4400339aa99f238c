"""Sinks: they pass the figures of a run on to CSV, TensorBoard, Weights & Biases and trackio. See docs/monitoring.md."""

from mpitrain.monitor.sinks.making import check_sinks as check_sinks
from mpitrain.monitor.sinks.making import make_sinks as make_sinks
from mpitrain.monitor.sinks.sink import About as About
from mpitrain.monitor.sinks.sink import Figures as Figures
from mpitrain.monitor.sinks.sink import Sink as Sink
