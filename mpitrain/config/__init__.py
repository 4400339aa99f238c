"""The settings of a run, their reading and their writing.

Defaults < TOML file (`--config FILE`) < flags (`--section.name value`). No torch here: a wrong setting is found before
torch is loaded.
"""

from mpitrain.config.reading import from_text, from_toml, parse
from mpitrain.config.settings import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    check_ranks,
)
from mpitrain.config.writing import differences, to_toml

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "check_ranks",
    "differences",
    "from_text",
    "from_toml",
    "parse",
    "to_toml",
]
