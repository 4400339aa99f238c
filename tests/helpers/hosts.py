"""Jobs on the hosts of mpirun/cluster."""

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest
from launching import ROOT, YIELDS, Result, run

CLUSTER = ROOT / "mpirun/cluster"


def need_namespaces() -> None:
    """Skip the test where no hosts can be made."""
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{tool} is not installed")
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0:
        spaces += ["--user", "--map-root-user"]
    made = subprocess.run(["unshare", *spaces, "true"], capture_output=True, text=True, timeout=20)
    if made.returncode != 0:
        pytest.skip(f"no namespaces can be made here: {made.stderr.strip()}")


def cluster(*args: str, env: Mapping[str, str] | None = None, **options: object) -> Result:
    """`mpirun/cluster run args...`; the options are those of `run`."""
    return run([CLUSTER, "run", *args], cwd=ROOT, env={**YIELDS, **(env or {})}, **options)  # type: ignore[arg-type]
