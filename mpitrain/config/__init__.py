"""The settings of a run: their types, and their reading and writing.

Flags (`--section.name value`) override a TOML file (`--config FILE`), which overrides the defaults. The package does not import torch,
so that a wrong setting is reported before torch is loaded.
"""

from mpitrain.config.data import DataConfig, SourceConfig
from mpitrain.config.errors import ConfigError, FolderInUseError
from mpitrain.config.optim import OptimConfig
from mpitrain.config.packing import packed_settings, unpacked_settings
from mpitrain.config.parallel import ParallelConfig
from mpitrain.config.ranks import check_ranks
from mpitrain.config.reading import from_text, from_toml, of_run, parse
from mpitrain.config.secrets import has_secrets, hidden, public
from mpitrain.config.settings import CheckpointConfig, Config, LogConfig, ModelConfig, TrainConfig
from mpitrain.config.writing import differences, to_toml

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
