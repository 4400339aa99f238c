"""Slurm for tests, without an installation: Debian's packages, unpacked into a folder below ~/.cache/mpitrain."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    *("slurm-client", "slurmctld", "slurmd", "slurm-wlm-basic-plugins", "libslurm38"),
    *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
    *("libpmix2", "libevent-core-2.1-7", "libevent-pthreads-2.1-7"),  # srun --mpi=pmix
)


def slurm_root() -> Path | None:
    """The folder with Slurm's, PMIx's and munge's files, to be laid over /; None if they cannot be had here. Downloads them once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpitrain"
    root = cache / f"slurm-wlm-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:8]}"
    if (root / "complete").exists():
        return root
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        return None
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    fetched = subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, capture_output=True, timeout=60)
    if fetched.returncode != 0:
        return None
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True, timeout=20)
        package.unlink()
    for name in ("slurmctld", "slurmd", "slurmstepd"):  # an installation chooses among flavours
        (root / "usr/sbin" / name).symlink_to(f"{name}-wlm")
    (pmix,) = root.glob("usr/lib/*/pmix2/lib/libpmix.so.2")
    pmix.with_name("libpmix.so").symlink_to(pmix.name)  # Slurm's plugin opens it by this name
    (root / "complete").touch()
    return root
