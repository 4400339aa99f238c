"""Checkpoints that are just HDF5: any number of ranks saves, any number loads, any tool looks inside, a crash loses none.

    ckpt.save("run/checkpoints/step-00000100", tensors, comm=comm, meta={"step": 100}, keep=3)
    meta = ckpt.load(ckpt.latest("run/checkpoints"), tensors, comm=comm)
    ckpt.open("run/checkpoints/step-00000100")["model/embed.weight"][:10]      # no MPI, no torch

A checkpoint is a folder: `rank-00000.h5` and so on, one file a rank, hold the bytes; `index.h5` shows every tensor in its full
shape to other tools; `manifest.jsonl` says where everything lies, with checksums, and is what we read ourselves.
`save(..., copies=[...])` writes the finished checkpoint to further places, URLs such as s3://bucket/run among them, too; reading takes
URLs everywhere.
`python -m ckpt ls | show | diff | verify | gc` look inside and clear up from a shell, `export | import | reshard` lead to other
files and back: docs/checkpoints.md.
"""

from ckpt.background import wait
from ckpt.checkpoint import Checkpoint, TensorEntry
from ckpt.checkpoint import open_checkpoint as open
from ckpt.exporting import export
from ckpt.folder import CheckpointInfo, find, latest, list_checkpoints
from ckpt.importing import import_file
from ckpt.inspecting import look
from ckpt.layout import Box
from ckpt.loading import load
from ckpt.manifest import CheckpointError
from ckpt.remote import Url
from ckpt.resharding import reshard
from ckpt.saving import save
from ckpt.tensors import Shard
from ckpt.verifying import Damage, verify

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "Damage",
    "Shard",
    "TensorEntry",
    "Url",
    "export",
    "find",
    "import_file",
    "latest",
    "list_checkpoints",
    "load",
    "look",
    "open",
    "reshard",
    "save",
    "verify",
    "wait",
]
