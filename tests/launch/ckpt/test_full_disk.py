"""Saving on a disk that is too small, or that somebody else fills up meanwhile: a tmpfs of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, job_environment, run

JOB = """
import os, sys, threading, time
import numpy as np, ckpt, collectives

folder = sys.argv[1]
comm = collectives.world()

def tensors(rows):
    return {"x": ckpt.Shard(np.full((rows, 1024), 1.0), (rows * comm.size, 1024), (rows * comm.rank, 0))}

def refused(rows, what, **options):
    try:
        ckpt.save(f"{folder}/step-2", tensors(rows), comm=comm, **options)
        ckpt.wait()
    except OSError as error:
        text = str(error)
    assert "No space left on device" in text and folder in text, text
    assert len(set(comm.all_gather_object(text))) == 1, text
    assert ckpt.latest(folder).name == "step-1" and ckpt.verify(f"{folder}/step-1") == []
    assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)
    if comm.rank == 0:
        print(what, "refused", flush=True)

ckpt.save(f"{folder}/step-1", tensors(10), comm=comm)
comm.barrier()
# each rank's 5 MB would find room, both together do not
refused(650, "too much")
if comm.rank == 0:
    assert os.system(f"head -c 5000000 /dev/zero > {folder}/filler") == 0
comm.barrier()
refused(400, "no longer room")
refused(400, "in the background", background=True)
# what is left on the disk when it is looked at is gone when it is written
import ckpt.saving.save
ckpt.saving.save.check_free = lambda folder, nbytes: None
for files in ("rank", "one"):
    refused(400, f"filled meanwhile, {files}", files=files)
    refused(400, f"filled meanwhile, background, {files}", files=files, background=True)
if comm.rank == 0:
    os.unlink(f"{folder}/filler")
comm.barrier()
ckpt.save(f"{folder}/step-2", tensors(400), comm=comm)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, for a disk of its own")
def test_a_full_disk_is_an_error_on_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    disk, script = tmp_path / "disk", tmp_path / "job.py"
    disk.mkdir()
    script.write_text(JOB)
    mount = f"mount -t tmpfs -o size=9m none {disk}"
    spaces = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*spaces, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    mpirun, settings = job_environment(2)
    job = f"{mount} && exec {mpirun} -np 2 {sys.executable} {script} {disk}"
    result = run([*spaces, "sh", "-c", job], env={**settings, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, str(result)
    assert result.stdout.count("refused") == 7, str(result)
