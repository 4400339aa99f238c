"""Saving and loading thousands of tensors starts no search through all objects of the process."""

import gc
from contextlib import ExitStack

import numpy as np
import pytest

import ckpt
from ckpt.garbage import no_collections


@pytest.fixture
def collections():
    """The generations that were searched."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


@pytest.mark.rest
@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_in_a_save_or_a_load(tmp_path, collections, enabled):
    tensors = {f"w{i}": np.full(3, i) for i in range(3000)}
    if not enabled:
        gc.disable()
    try:
        gc.collect()  # so that no search of older objects is due between the calls
        collections.clear()
        ckpt.save(tmp_path / "step-1", tensors, comm=None)
        ckpt.load(tmp_path / "step-1", tensors)
        # the first allocation afterwards may search the youngest objects
        assert [generation for generation in collections if generation > 0] == []
        assert gc.isenabled() is enabled
        with pytest.raises(ckpt.CheckpointError):
            ckpt.load(tmp_path / "step-2", tensors)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_threads_that_save_at_the_same_time_turn_the_search_on_again_together():
    first, second = ExitStack(), ExitStack()
    first.enter_context(no_collections())
    second.enter_context(no_collections())
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled()
