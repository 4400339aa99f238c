"""Checkpoints that are just HDF5: any number of ranks saves, any number loads, any tool looks inside, a crash loses none.

    ckpt.save("run/checkpoints/step-00000100", tensors, comm=comm, meta={"step": 100}, keep=3)
    meta = ckpt.load(ckpt.latest("run/checkpoints"), tensors, comm=comm)
    ckpt.open("run/checkpoints/step-00000100")["model/embed.weight"][:10]      # no MPI, no torch

A checkpoint is a folder: `rank-00000.h5` and so on, one file a rank, hold the bytes; `index.h5` shows every tensor in its full
shape to other tools; `manifest.jsonl` says where everything lies, with checksums, and is what we read ourselves.
`save(..., copies=[...])` writes the finished checkpoint to further places, URLs such as s3://bucket/run among them, too; reading takes
URLs everywhere.
`python -m ckpt ls DIR` and `python -m ckpt show DIR [TENSOR]` look inside from a shell.
"""

from ckpt.background import wait
from ckpt.checkpoint import Checkpoint, TensorEntry
from ckpt.checkpoint import open_checkpoint as open
from ckpt.folder import CheckpointInfo, find, latest, list_checkpoints
from ckpt.layout import Box
from ckpt.loading import load
from ckpt.manifest import CheckpointError
from ckpt.places import Url
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
    "find",
    "latest",
    "list_checkpoints",
    "load",
    "open",
    "save",
    "verify",
    "wait",
]
