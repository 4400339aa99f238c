"""Checkpoints in plain HDF5: any number of ranks saves, any number loads, any HDF5 tool reads them, and a crash loses none.

    ckpt.save("run/checkpoints/step-00000100", tensors, comm=comm, meta={"step": 100}, keep=3)
    meta = ckpt.load(ckpt.latest("run/checkpoints"), tensors, comm=comm)
    ckpt.open("run/checkpoints/step-00000100")["model/embed.weight"][:10]      # no MPI, no torch

A checkpoint is a folder: `rank-00000.h5` and so on, one file per rank, hold the bytes; `index.h5` shows every tensor in its full
shape to other tools; `manifest.jsonl` has the place and checksum of all bytes, and is the file that this package reads.
`save(..., copies=[...])` also copies the finished checkpoint to other places, including URLs such as s3://bucket/run; all reading
functions take URLs.
`python -m ckpt ls | show | diff | verify | gc` inspect checkpoints and clean up from a shell, `export | import | reshard` convert to
other files and back: docs/checkpoints.md.
"""

from ckpt.check.inspecting import look
from ckpt.check.verifying import verify
from ckpt.convert.exporting import export
from ckpt.convert.importing import import_file
from ckpt.convert.resharding import reshard
from ckpt.format.boxes import Box
from ckpt.format.manifest import CheckpointError
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.checkpoint import open_checkpoint as open
from ckpt.reading.entry import TensorEntry
from ckpt.reading.loading import load
from ckpt.reading.mapping import VectorFiles, map_vector
from ckpt.saving.background import wait
from ckpt.saving.save import save
from ckpt.storage.catalog import CheckpointInfo, find, latest, list_checkpoints
from ckpt.storage.checksums import Damage
from ckpt.storage.remote import Url
from ckpt.tensors import Shard

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "Damage",
    "Shard",
    "TensorEntry",
    "Url",
    "VectorFiles",
    "export",
    "find",
    "import_file",
    "latest",
    "list_checkpoints",
    "load",
    "look",
    "map_vector",
    "open",
    "reshard",
    "save",
    "verify",
    "wait",
]
