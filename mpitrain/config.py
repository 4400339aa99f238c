"""The settings of a run: the public names of job/config."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.job.config import (
        CheckpointConfig,
        Config,
        ConfigError,
        DataConfig,
        FolderInUseError,
        LogConfig,
        ModelConfig,
        OptimConfig,
        ParallelConfig,
        SourceConfig,
        TrainConfig,
        check_ranks,
        differences,
        from_text,
        from_toml,
        has_secrets,
        hidden,
        of_run,
        packed_settings,
        parse,
        public,
        to_toml,
        unpacked_settings,
    )

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "FolderInUseError",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "SourceConfig",
    "TrainConfig",
    "check_ranks",
    "differences",
    "from_text",
    "from_toml",
    "has_secrets",
    "hidden",
    "of_run",
    "packed_settings",
    "parse",
    "public",
    "to_toml",
    "unpacked_settings",
]

__path__: list[str] = []  # a package for old paths of modules, which _moved.py leads to job/config


def __getattr__(name: str) -> Any:
    if name in __all__:  # loading torch takes seconds
        return getattr(import_module("mpitrain.job.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
