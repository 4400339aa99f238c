"""Two sources of documents, for tests under MPI."""

import json
from pathlib import Path

from collectives import Communicator


def two_sources(comm: Communicator, folder: Path) -> Path:
    """Write sources a and b of 60 documents each into a folder that all ranks see; returns the settings that name them. Collective."""
    if comm.rank == 0:
        for name in ("a", "b"):
            lines = [json.dumps({"text": f"document {number} of {name}, " * (number % 7 + 1)}) for number in range(60)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        tables = [f'[[data.sources]]\nname = "{name}"\npath = ["{folder}/{name}.jsonl"]' for name in ("a", "b")]
        (folder / "run.toml").write_text("\n".join(tables))
    comm.barrier()
    return folder / "run.toml"
