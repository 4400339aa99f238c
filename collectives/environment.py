"""Settings in environment variables: switches with the value 0 or 1, choices, times, and folders.

Other modules read their other variables themselves.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

SWITCHES = ("MPITRAIN_CUDA_AWARE", "MPITRAIN_DEBUG", "MPITRAIN_PEER_READS", "MPITRAIN_PROGRESS_THREAD")
USUAL_MEMORY_FOLDER = Path("/dev/shm")
CHOICES = {**dict.fromkeys(SWITCHES, ("0", "1")), "MPITRAIN_CODEC": ("numpy", "c", "avx2", "avx512")}


def choice(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of a variable of `CHOICES`; None if it is unset, empty or "auto". ValueError for other values."""
    said = environ.get(name, "")
    if said not in ("", "auto", *CHOICES[name]):
        raise ValueError(f"{name} is {said!r}; expected {', '.join(CHOICES[name])} or auto")
    return None if said in ("", "auto") else said


def switch(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """True if the variable is 1, False if it is 0, None if it is unset, empty or "auto". ValueError for other values."""
    said = choice(name, environ)
    return None if said is None else said == "1"


def check_choices() -> None:
    """ValueError if a variable of `CHOICES` has a wrong value, even if this job never reads the variable."""
    for name in CHOICES:
        choice(name)


def seconds_of(name: str, default: float, none: str) -> float:
    """The variable in seconds, `default` if it is unset or empty. `none`: the meaning of 0, for the ValueError for other values."""
    said = os.environ.get(name, "")
    try:
        return checked_seconds(float(said)) if said else default
    except ValueError:
        raise ValueError(
            f"{name} is {said!r}; expected seconds of at least 0, such as {default:g}, or 0 for {none}"
        ) from None


def checked_seconds(value: float) -> float:
    """Returns `value`. ValueError unless it is a finite number of at least 0."""
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r}; expected seconds of at least 0")
    return value


def cache_folder() -> Path:
    """The user's cache folder: MPITRAIN_CACHE_DIR, else $XDG_CACHE_HOME/mpitrain, else ~/.cache/mpitrain."""
    if chosen := os.environ.get("MPITRAIN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mpitrain")


def memory_folder() -> Path:
    """The folder of the node's shared-memory files: MPITRAIN_SHM_DIR, else /dev/shm, else the folder for temporary files."""
    chosen = os.environ.get("MPITRAIN_SHM_DIR")  # empty: as if it were unset
    return Path(chosen or (USUAL_MEMORY_FOLDER if USUAL_MEMORY_FOLDER.is_dir() else gettempdir()))
