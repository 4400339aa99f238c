"""Pipeline parallelism: a model's blocks divided into stages, and the schedules by which ranks compute them."""

from collectives.diagnosis import stacks
from mpitrain.stages.api import Pipeline, pipeline
from mpitrain.stages.executor import Run
from mpitrain.stages.messages import Messages
from mpitrain.stages.places import in_program, of_message
from mpitrain.stages.plan import StagePlan

stacks.pass_over("torch", __name__)
stacks.name(Run.take, lambda local: in_program(local["self"].program, local["at"]))
stacks.name(Messages.receive, of_message)
stacks.name(
    Messages.end, lambda local: "the end of a step of a pipeline, which waits until the other ranks have its messages"
)

__all__ = ["Pipeline", "StagePlan", "pipeline"]
