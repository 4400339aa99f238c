"""Copies in a real S3 server on this machine, and reading from it. Needs moto's server and s3fs, which nothing else here does."""

import shutil

import numpy as np
import pytest
from thread_ranks import on_ranks

import ckpt
from ckpt.storage.remote import Url

s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install 'mpitrain[remote]'")
server = pytest.importorskip("moto.server", reason="needs an S3 server: pip install 'moto[server]'")


@pytest.fixture(scope="module")
def bucket():
    """The URL of an empty bucket."""
    with pytest.MonkeyPatch.context() as environment:
        running = server.ThreadedMotoServer(port=0, verbose=False)
        running.start()
        host, port = running.get_host_and_port()
        for key, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            environment.setenv(key, value)
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("bucket")
        yield "s3://bucket"
        running.stop()


def shards(comm, value):
    """17 MB of a tensor in all, so that a file takes more than one request."""
    rows = np.full((1 << 20, 1), float(value + comm.rank))
    return {"x": ckpt.Shard(rows, (rows.size * comm.size, 1), (rows.size * comm.rank, 0)), "s": np.array(value)}


def test_ranks_copy_to_s3_and_load_from_there(tmp_path, bucket):
    place = f"{bucket}/run"

    def act(comm):
        for step in (1, 2, 3):
            ckpt.save(tmp_path / f"step-{step}", shards(comm, step), comm=comm, copies=[place], keep=2)
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(tmp_path / "step-3")
        comm.barrier()
        out = shards(comm, 0)
        ckpt.load(ckpt.latest(tmp_path, copies=[place]), out, comm=comm)
        assert (out["x"].data == 3 + comm.rank).all() and out["s"] == 3

    on_ranks(2, act)
    assert sorted(Url(place).names()) == ["latest", "step-2", "step-3"]
    assert sorted(Url(f"{place}/step-3").names()) == ["index.h5", "manifest.jsonl", "rank-00000.h5", "rank-00001.h5"]
    assert ckpt.latest(place) == Url(f"{place}/step-3") and ckpt.verify(f"{place}/step-2") == []
    assert [c.complete for c in ckpt.list_checkpoints(place)] == [True, True]
    assert (ckpt.open(f"{place}/step-3")["x"][5:7] == 3).all()


def test_damage_and_absence_in_s3_are_named(tmp_path, bucket):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(1000.0)}, comm=None, copies=[f"{bucket}/damaged"])
    url = Url(f"{bucket}/damaged/a")
    data = bytearray((url / "rank-00000.h5").read())
    data[-1] ^= 1
    (url / "rank-00000.h5").write(bytes(data))
    (damage,) = ckpt.verify(url)
    assert damage.tensor == "x"
    out = {"x": np.zeros(1000)}
    with pytest.warns(RuntimeWarning, match="s3://bucket/damaged/a: tensor 'x': rank-00000.h5 is damaged"):
        ckpt.load(url, out, copies=[path.parent])
    assert out["x"][-1] == 999
    (url / "rank-00000.h5").write(b"")
    with pytest.raises(ckpt.CheckpointError, match=r"rank-00000\.h5 has 0 bytes instead of"):
        ckpt.open(url)
    with pytest.raises(ckpt.CheckpointError, match="s3://bucket/nowhere does not exist"):
        ckpt.open(f"{bucket}/nowhere")
    assert ckpt.latest(f"{bucket}/nowhere") is None


def test_a_bucket_that_is_not_there_is_a_warning_and_is_not_made(tmp_path, bucket):
    with pytest.warns(RuntimeWarning, match="the copy s3://other-bucket/run/a was not made"):
        ckpt.save(tmp_path / "a", {"x": np.zeros(3)}, comm=None, copies=["s3://other-bucket/run"])
    assert not s3fs.S3FileSystem(use_listings_cache=False).exists("other-bucket")
