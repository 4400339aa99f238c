"""What a batch job says at its end of the shards that it leaves on a node's disk: nobody else there may know of them."""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpitrain.config import DataConfig
from mpitrain.data.cache import cache_folder, needs_copy
from mpitrain.data.remarks import Remark, say_remark
from mpitrain.data.shards import ShardList

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def say_what_stays(config: DataConfig, lists: Iterable[ShardList], *, speaks: bool) -> None:
    """Print a line about the cache of this node, if this is a batch job and shards of these lists go through the cache.

    Also if the user has named the folder: the line says how much is there, with the shards of earlier jobs. `speaks`: of one process of
    each node. No error: a job ends.
    """
    if (
        not speaks
        or not any(map(os.environ.get, _JOBS))
        or not any(needs_copy(path) for its in lists for path in its.paths)
    ):
        return
    if text := _about(cache_folder(config.cache), config.cache_bytes):
        say_remark(Remark(text))


def _about(folder: Path, limit_bytes: int) -> str:
    """The line about a folder of the cache; "" if nothing is there."""
    num_shards, num_bytes = 0, 0
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return ""
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another job makes room
                    its = entry.stat(follow_symlinks=False)
                    # Beside the shards there are locks, and what killed ranks have left.
                    num_shards += "." not in entry.name
                    num_bytes += its.st_size
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""
        return f"this batch job may leave shards in {folder} on {os.uname().nodename}: {error.strerror}"
    if not num_bytes:
        return ""
    return (
        f"this batch job leaves {folder} on {os.uname().nodename}: {num_shards:,} shard{'s' * (num_shards != 1)}, {num_bytes:,} bytes, "
        f"for later runs there (data.cache_bytes: at most {limit_bytes:,}); remove the folder if none needs them"
    )
