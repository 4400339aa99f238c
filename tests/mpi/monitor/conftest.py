"""Small trainers."""

from pathlib import Path

import pytest
from small_trainers import Make, maker

from collectives import Communicator


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder."""
    return maker(comm, shared_tmp, monkeypatch)
