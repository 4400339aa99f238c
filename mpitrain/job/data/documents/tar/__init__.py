"""Samples in tar files. headers.py finds the entries, entries.py the files among them, with the bytes of links and sparse files, and
reading.py the samples."""

from mpitrain.job.data.documents.tar.entries import Place
from mpitrain.job.data.documents.tar.reading import TarReader

__all__ = ["Place", "TarReader"]
