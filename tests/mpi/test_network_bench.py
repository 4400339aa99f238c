"""`python -m mpitrain bench losses` on ranks that pretend to be on two hosts."""

from pathlib import Path

import numpy as np
import pytest
from pretended_hosts import on_hosts

from collectives import Communicator
from mpitrain.tools.bench.network import losses
from mpitrain.tools.bench.network.results import LossesLaunch

pytestmark = pytest.mark.rest


@pytest.mark.ranks(2)
def test_an_interrupted_bench_of_losses_goes_on(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    # only the reference for `mfu`, which takes longer than the rest of such a run
    monkeypatch.setattr("mpitrain.job.train.trainer.matmul_flops_per_s", lambda device, dtype: 1e9)
    text, file = shared_tmp / "text", shared_tmp / "losses.json"
    if comm.rank == 0:
        text.write_bytes(b" ".join(np.random.default_rng(0).choice([b"node", b"rank", b"shard"], 4000)))
    comm.barrier()
    small = (
        "--model.width 32 --model.layers 1 --model.heads 2 --model.context 16 --parallel.no-bind --parallel.threads 1"
    )
    words = ["--steps", "3", "--json", str(file), "--settings", f"{small} --data.path {text}"]
    with pytest.raises(ValueError, match="case int8 encodes between nodes alone, and these ranks are on one"):
        losses.main([*words, "--cases", "exact,int8"], comm)

    hosts = on_hosts(comm.mpi, [0, 1])
    losses.main([*words, "--cases", "exact", "--seeds", "1"], hosts)
    first = LossesLaunch.read(str(file)).runs
    losses.main([*words, "--cases", "exact,int8-weights", "--seeds", "2"], hosts)
    runs = LossesLaunch.read(str(file)).runs
    assert [(run.case, run.seed) for run in runs] == [
        ("exact", 0),
        ("int8-weights", 0),
        ("exact", 1),
        ("int8-weights", 1),
    ]
    assert runs[:1] == first, "a run that the file has is not done again"
    of = {(run.case, run.seed): run.loss for run in runs}
    for seed in (0, 1):
        assert 0 < abs(of["int8-weights", seed] - of["exact", seed]) < abs(of["exact", 0] - of["exact", 1])
    assert sorted(path.name for path in shared_tmp.iterdir()) == ["losses.json", "text"], "no folder of a run is left"
    if comm.rank == 0:
        assert "int8-weights" in capsys.readouterr().out
    hosts.free()
