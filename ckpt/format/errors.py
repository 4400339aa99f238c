"""Errors of the system and of HDF5 that name their file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn every failure to write `path` into an OSError that names it; os.pwrite and HDF5 do not do so reliably."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is not None and error.strerror:
            raise OSError(error.errno, error.strerror.splitlines()[0], str(path)) from error
        raise OSError(f"{path}: {error}") from error
    except RuntimeError as error:  # h5py raises it when it closes a file on a full disk
        raise OSError(f"{path}: {error}") from error
