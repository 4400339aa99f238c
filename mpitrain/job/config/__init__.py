"""The settings of a run: their types, and their reading and writing.

Flags (`--section.name value`) override a TOML file (`--config FILE`), which overrides the defaults. The package does not import torch,
so that a wrong setting is reported before torch is loaded.
"""

from mpitrain.job.config.data import DataConfig, SourceConfig
from mpitrain.job.config.errors import ConfigError, FolderInUseError
from mpitrain.job.config.optim import OptimConfig
from mpitrain.job.config.packing import packed_settings, unpacked_settings
from mpitrain.job.config.parallel import ParallelConfig
from mpitrain.job.config.ranks import check_ranks
from mpitrain.job.config.reading import from_text, from_toml, of_run, parse
from mpitrain.job.config.secrets import has_secrets, hidden, public
from mpitrain.job.config.settings import CheckpointConfig, Config, LogConfig, ModelConfig, TrainConfig
from mpitrain.job.config.writing import differences, to_toml

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
