"""The commit and the removal of a checkpoint in any place, and the choice of old ones to remove."""

import errno
import warnings

from ckpt.commit.atomic import Stage
from ckpt.commit.upload import Upload
from ckpt.storage.catalog import info, newest_first, reason_to_keep, step_of
from ckpt.storage.places import Place
from ckpt.storage.remote import Url


def stage_for(final: Place) -> Stage | Upload:
    """The object that makes the checkpoint `final`, or removes it.

    In a local place the commit is a rename, in a remote one the manifest's upload. It has a `path`, in which each rank puts its files,
    and for rank 0 `open`, `publish`, `discard`, `withdraw` and `newest_sequence`.
    """
    return Upload(final) if isinstance(final, Url) else Stage(final)


def retain(final: Place, keep: int | None, keep_every: int | None = None) -> None:
    """Remove what is older than the newest `keep` complete checkpoints beside `final`, but not `final` itself.

    Only checkpoints whose name ends with a step count and are removed: a name such as "best" means that a user wants to keep it. A
    step that is a multiple of `keep_every` stays, too. The newest checkpoint is the one saved last, whatever its step.
    """
    for path in [] if keep is None else outdated(final, keep, keep_every):
        try:
            remove(path)
        except OSError as error:
            if not path.is_there():  # another save that clears up as well was faster
                continue
            # The new checkpoint stands: no reason to end a run.
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
    """Remove a checkpoint: under its name it is gone at once. OSError if not even that can be done, or may not be."""
    if reason := reason_to_keep(path):
        raise PermissionError(errno.EPERM, f"it {reason}", str(path))
    stage_for(path).withdraw()
