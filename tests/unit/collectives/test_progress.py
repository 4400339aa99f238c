"""The progress thread and the thread that waits for it agree on whether an operation has ended."""

import threading
import time
import weakref

import numpy as np
import pytest

from collectives.progress.on_thread import Thread, _Threaded


def test_an_operation_that_has_ended_is_counted_given_back_and_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress thread stands still between the end of the operation and its news for those who wait."""
    progress, gate, news = Thread(), threading.Event(), threading.Event()
    x = np.zeros(3)
    of_x = weakref.ref(x)

    def operation(x: np.ndarray = x) -> int:
        gate.wait(10)
        return x.size

    work = progress.issue(operation, "all_reduce", None)
    assert isinstance(work, _Threaded)
    tell = work._event.set
    monkeypatch.setattr(work._event, "set", lambda: news.wait(10) and tell())
    del operation, x
    assert not work.done()
    gate.set()
    until = time.monotonic() + 10
    while work.is_left:
        assert time.monotonic() < until
    assert (work.wait(), work.done()) == (3, True)
    assert progress.hidden_s > 0
    assert of_x() is None
    news.set()
    progress.close()
