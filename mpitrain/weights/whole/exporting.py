"""Exports the weights of a model to files: rank 0 writes the pieces that the other ranks send."""

import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from ckpt.convert.formats.safetensors import INDEX, FileTensor, exported, file_names, header, index_text, split
from ckpt.storage.catalog import check_outside
from ckpt.storage.local import Output
from ckpt.storage.places import local_path
from collectives.arrays.dtypes import dtype_of
from mpitrain.weights.buffers import persistent_buffers, warn_of_differences
from mpitrain.weights.targets import Target, begin, chunks_on_rank0, ranks_of_model, weights_of


@torch.no_grad()
def export_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the whole weights of a model, sharded or not, as safetensors files with Hugging Face's names. Collective.

    Each rank needs memory for 16 MiB and one copy of them. Tied weights are written once, under the first of their names. Buffers are
    those of data rank 0. Between two outer steps of `DiLoCo` the weights are the outer parameters. Files get their names when all of
    them are complete.

    Args:
        path: a folder for `model.safetensors`, or, if this file were longer than `max_file_bytes`, for several files and an index.
            Or one file, named `*.safetensors`, of any length.
        dtype: cast floating-point values to it; None: keep the dtypes of the model.
        overwrite: replace existing weights.

    Raises:
        ValueError: on all ranks: a dtype that the format does not have, a `max_file_bytes` below 1, a path in a checkpoint, a URL.
        OSError: on all ranks: weights exist already, or the disk is full.
        RuntimeError: in the middle of a step or within `unshard`.
    """
    comm, over = begin(model, "export_weights"), ranks_of_model(model)
    warn_of_differences(persistent_buffers(model), over, "export_weights", stacklevel=4)
    rank0 = comm.rank == 0
    targets = {target.names[0]: target for target in weights_of(model)}
    tensors = [_as_written(name, target, dtype) for name, target in targets.items()]
    is_file = str(path).endswith(".safetensors")
    before: list[Path] = []
    with comm.together("export_weights"):
        target = local_path(path, "path", "a file or a folder on a disk")
        folder = target.parent if is_file else target
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {max_file_bytes}; expected at least 1")
        header(tensors)  # raises ValueError for dtypes that the format does not have
        if rank0:
            check_outside(folder)
            before = exported(folder) if not is_file else [target] if target.exists() else []
            if before and not overwrite:
                raise FileExistsError(f"{before[0]} exists already; overwrite=True replaces it")
            folder.mkdir(parents=True, exist_ok=True)
    parts = [tensors] if is_file else split(tensors, max_file_bytes)
    files = dict(zip([target.name] if is_file else file_names(len(parts)), parts, strict=True))
    outputs = [_Output(folder / name) for name in files] if rank0 else []
    try:
        for number, content in enumerate(files.values()):
            if rank0:
                outputs[number].write(header(content))
            its = [targets[tensor.name] for tensor in content]
            for chunk in chunks_on_rank0(its, [getattr(torch, tensor.dtype) for tensor in content], over):
                outputs[number].write(chunk.reshape(-1).view(torch.uint8).numpy())
            with comm.together("export_weights"):
                if rank0:
                    outputs[number].close()
        with comm.together("export_weights"):
            if rank0:
                if len(files) > 1:
                    outputs.append(_Output(folder / INDEX))
                    outputs[-1].write(index_text(files).encode())
                    outputs[-1].close()
                for old in before:
                    old.unlink()
                for output in outputs:
                    output.commit()
    finally:
        for output in outputs:
            output.discard()


def _as_written(name: str, target: Target, dtype: torch.dtype | None) -> FileTensor:
    kind = dtype if dtype is not None and target.tensor.is_floating_point() else target.tensor.dtype
    return FileTensor(name, target.shape, dtype_of(kind).name, prod(target.shape) * kind.itemsize)


class _Output(Output):
    """Keeps the first error of a write until `close`, because the sending ranks cannot be notified earlier."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None

    def write(self, data: Any) -> None:
        """Add bytes."""
        if self._failure is None:
            try:
                if self._file is None:
                    self._file = os.fdopen(self.make(), "wb")
                self._file.write(data)
            except OSError as error:
                self._failure = error

    def close(self) -> None:
        """Bring the file to disk. OSError if this or a write failed."""
        try:
            if self._failure is None and self._file is not None:
                self._file.close()
                self.flush()
        except OSError as error:
            self._failure = error
        if self._failure is not None:
            raise OSError(f"{self.path} cannot be written: {self._failure.strerror or self._failure}")

    def discard(self) -> None:
        """Remove the file, unless it has got its name."""
        if self._file is not None:
            with suppress(OSError):  # a full disk, which `close` has reported
                self._file.close()
            super().discard()
