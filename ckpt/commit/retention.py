"""The commit and the removal of a checkpoint in any place, and the choice of old checkpoints to remove."""

import errno
import warnings

from ckpt.commit.atomic import Stage
from ckpt.commit.upload import Upload
from ckpt.storage.catalog import info, newest_first, reason_to_keep, step_of
from ckpt.storage.places import Place
from ckpt.storage.remote import Url


def stage_for(final: Place, *, private: bool = False) -> Stage | Upload:
    """The object that makes or removes the checkpoint `final`.

    In a local place the commit is a rename, in a remote place the upload of the manifest. The object has a `path`, where each rank puts
    its files. Only rank 0 calls `open`, `publish`, `discard`, `withdraw` and `newest_sequence`. `private`: see `Stage`.
    """
    return Upload(final) if isinstance(final, Url) else Stage(final, private=private)


def retain(final: Place, keep: int | None, keep_every: int | None = None) -> None:
    """Remove checkpoints in the folder of `final` that are older than the newest `keep` complete ones, but never `final` itself.

    Only checkpoints whose name ends with a step count and are removed: with a name such as "best", a user wants to keep one. A
    checkpoint whose step is a multiple of `keep_every` stays, too. The newest checkpoint is the one saved last, for any step.
    """
    for path in [] if keep is None else outdated(final, keep, keep_every):
        try:
            remove(path)
        except OSError as error:
            if not path.is_there():  # another save has removed it
                continue
            # The new checkpoint is complete, so the run goes on.
            warnings.warn(f"the old checkpoint {path} could not be removed: {error}", RuntimeWarning, stacklevel=2)


def outdated(final: Place, keep: int, keep_every: int | None = None) -> list[Place]:
    """The checkpoints that `retain` removes, newest first."""
    complete = 0
    found = []
    for path, _ in newest_first(final.parent):
        step = step_of(path.name)
        if step is None or (keep_every is not None and step % keep_every == 0 and path != final):
            continue
        if complete >= keep and path != final:
            found.append(path)
        elif info(path, path.name).complete:
            complete += 1
    return found


def remove(path: Place) -> None:
    """Remove a checkpoint. Its name disappears at once. OSError if this is not possible, or not allowed."""
    if reason := reason_to_keep(path):
        raise PermissionError(errno.EPERM, f"it {reason}", str(path))
    stage_for(path).withdraw()
