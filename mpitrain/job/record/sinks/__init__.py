"""Sinks: they pass the figures of a run on to CSV, TensorBoard, Weights & Biases and trackio. See docs/monitoring.md."""

from mpitrain.job.record.sinks.making import check_sinks as check_sinks
from mpitrain.job.record.sinks.making import make_sinks as make_sinks
from mpitrain.job.record.sinks.sink import About as About
from mpitrain.job.record.sinks.sink import Figures as Figures
from mpitrain.job.record.sinks.sink import Sink as Sink
