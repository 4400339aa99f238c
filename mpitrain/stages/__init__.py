"""Pipeline parallelism: a model's blocks divided into stages, and the schedules by which ranks compute them.

`pipeline` needs torch. The schedules do not, so this package imports torch only when a name that needs it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.plans.stage_plan import StagePlan
    from mpitrain.stages.api import Pipeline, pipeline

__all__ = ["Pipeline", "StagePlan", "pipeline"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(
            import_module("mpitrain.plans.stage_plan" if name == "StagePlan" else "mpitrain.stages.api"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
