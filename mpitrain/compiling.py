"""What torch's compiler leaves alone: the code of these packages that runs around a forward, an optimizer's step or a message.

torch.compile of a whole model, or of a whole step of training, would trace it, compile it again for each parameter, and log that it has
reached a limit of compilations. Layers of mpitrain stay compiled: those of its models, of cut layers and of stages.
"""

import os
from pathlib import Path

from mpitrain.torch_internals import not_compiled, uncompiled_paths

_HERE = Path(__file__).parent
_FOLDERS = [
    *(_HERE.parent / name for name in ("ckpt", "collectives")),
    *(_HERE / name for name in ("optim", "weights")),
    *(path.parent for path in sorted((_HERE / "sharding").glob("*/__init__.py"))),
]
# checkpointing.py is not among them: torch's compiler takes its checkpoints into graphs.
_FILES = [
    *(path for path in sorted((_HERE / "sharding").glob("*.py")) if path.name != "checkpointing.py"),
    *(
        _HERE / f"{name}.py"
        for name in ("agreement", "batch_norm", "parts", "rank0", "stage_streams", "torch_internals")
    ),
]

_paths = [*(f"{folder}{os.sep}" for folder in _FOLDERS), *map(str, _FILES)]
"""Empty when the compiler knows them."""


@not_compiled
def keep_compiler_out() -> None:
    """Tell torch's compiler, if the program has imported it, what to leave alone. Called where a compiled function comes in first."""
    if _paths and uncompiled_paths(_paths):
        _paths.clear()
