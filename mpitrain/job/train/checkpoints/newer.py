"""What a run says if a newer release of this library has worked on it before."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import ckpt
from collectives.texts import shown, without_secrets
from collectives.version import newer_release, release
from mpitrain.job.record.parsing.events import read_events


def about_newer(start: Path | ckpt.Url | None, folder: Path | None) -> str:
    """A line if a newer release has saved the checkpoint `start`, or began to train in `folder` last; else "".

    The files may be a stranger's: what tells no release says nothing, as in checkpoints and runs of older releases. `folder`: None if
    the run does not go on there.
    """
    told = list[tuple[str, Any]]()
    with suppress(OSError, ValueError):  # loading the checkpoint reports its error
        if start is not None:
            told.append((f"{start} was saved by", ckpt.open(start).release))
    with suppress(OSError, ValueError):
        if folder is not None:
            begins = [event for event in read_events(folder) if event.get("event") == "begin"]
            told += [(f"{folder} was trained by", event.get("release")) for event in begins[-1:]]
    for words, its in told:
        if (newer := newer_release(its)) is not None:
            return (
                f"notice: {shown(without_secrets(words))} mpitrain {newer}, which is newer than {release()} here; what is new there "
                "may have no effect or give an error here: update mpitrain, or go on with that version"
            )
    return ""
