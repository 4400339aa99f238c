"""The settings of a run: the public names of job/config."""

from mpitrain.job.config import *  # noqa: F403
from mpitrain.job.config import __all__ as __all__

__path__: list[str] = []  # a package for old paths of modules, which _moved.py leads to job/config
