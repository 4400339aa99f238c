"""Pipeline parallelism: a model's blocks divided into stages, and the schedules by which ranks compute them."""

from mpitrain.stages.api import Pipeline, pipeline
from mpitrain.stages.plan import StagePlan

__all__ = ["Pipeline", "StagePlan", "pipeline"]
