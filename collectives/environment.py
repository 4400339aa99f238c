"""Settings that come as environment variables of the value 0 or 1. Those with values of their own are read where they are used."""

import os
from collections.abc import Mapping

SWITCHES = ("MPITRAIN_CUDA_AWARE", "MPITRAIN_DEBUG", "MPITRAIN_PEER_READS", "MPITRAIN_PROGRESS_THREAD")


def switch(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Whether the variable is 1 or 0; None where it is unset, empty or "auto". ValueError for anything else."""
    said = environ.get(name, "")
    if said not in ("", "auto", "0", "1"):
        raise ValueError(f"{name} is {said!r}; expected 0, 1 or auto")
    return None if said in ("", "auto") else said == "1"


def check_switches() -> None:
    """ValueError where one of them is neither, also if nothing in this job would ever read it."""
    for name in SWITCHES:
        switch(name)
