"""Copies in a real S3 server on this machine, reading from it, and downloads by both libraries."""

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from s3_server import S3Server
from thread_ranks import on_ranks

import ckpt
from ckpt.storage import s3 as by_obstore
from ckpt.storage.remote import Url


def shards(comm, value):
    """17 MB of a tensor in all, so that a file takes more than one request."""
    rows = np.full((1 << 20, 1), float(value + comm.rank))
    return {"x": ckpt.Shard(rows, (rows.size * comm.size, 1), (rows.size * comm.rank, 0)), "s": np.array(value)}


@pytest.mark.rest
def test_ranks_copy_to_s3_and_load_from_there(tmp_path, s3):
    place = "s3://bucket/run"

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
    objects = s3.client.list_objects_v2(Bucket="bucket", Prefix="run/")["Contents"]
    assert {each["Key"].split("/")[1] for each in objects} == {"latest", "step-2", "step-3"}
    assert sorted(Url(f"{place}/step-3").names()) == ["index.h5", "manifest.jsonl", "rank-00000.h5", "rank-00001.h5"]
    assert ckpt.latest(place) == Url(f"{place}/step-3") and ckpt.verify(f"{place}/step-2") == []
    assert [c.complete for c in ckpt.list_checkpoints(place)] == [True, True]
    assert (ckpt.open(f"{place}/step-3")["x"][5:7] == 3).all()


def test_damage_and_absence_in_s3_are_named(tmp_path, s3):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(1000.0)}, comm=None, copies=["s3://bucket/damaged"])
    url = Url("s3://bucket/damaged/a")
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
        ckpt.open("s3://bucket/nowhere")
    assert ckpt.latest("s3://bucket/nowhere") is None


def test_a_bucket_that_is_not_there_is_a_warning_and_is_not_made(tmp_path, s3):
    with pytest.warns(RuntimeWarning, match="the copy s3://other-bucket/run/a was not made"):
        ckpt.save(tmp_path / "a", {"x": np.zeros(3)}, comm=None, copies=["s3://other-bucket/run"])
    assert [each["Name"] for each in s3.client.list_buckets()["Buckets"]] == ["bucket"]


DATA = bytes(range(256)) * 40_000


@pytest.fixture(params=["obstore", "s3fs"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that downloads."""
    if request.param == "obstore":
        pytest.importorskip("obstore")
    else:
        monkeypatch.setitem(sys.modules, "obstore", None)
    return request.param


@pytest.mark.rest
def test_downloads(tmp_path: Path, s3: S3Server, library: str) -> None:
    for key in ("d/1.tar", "d/a b+c%20d?#*[e]=ü.tar", "d//e.tar"):
        url = Url(s3.put(key, DATA))
        s3.requests.clear()
        url.download(tmp_path / "there")
        assert (tmp_path / "there").read_bytes() == DATA and len(s3.gets()) == 1
    for name in ("s3://bucket/d/2.tar", "s3://no-bucket/d/1.tar"):
        with pytest.raises(FileNotFoundError, match=f"No such file.*{name}"):
            Url(name).download(tmp_path / "there")
    for fault, text in (("slow down", "Please reduce your request rate"), ("cut", r"(payload|body)")):
        s3.meddle = lambda method, path, fault=fault: fault
        began = time.monotonic()
        with pytest.raises(OSError, match=rf"^(?s:.)*{text}") as caught:
            Url("s3://bucket/d/1.tar").download(tmp_path / "there")
        assert "s3://bucket/d/1.tar" in str(caught.value) and "\n" not in str(caught.value)
        assert time.monotonic() - began < 15.0


@pytest.mark.rest
def test_keys_of_the_wrong_user(tmp_path: Path, s3: S3Server, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = Url(s3.put("e/1.tar", DATA))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    by_obstore._store.cache_clear()
    monkeypatch.setattr("fsspec.spec.AbstractFileSystem.cachable", False)
    monkeypatch.setattr("s3fs.S3FileSystem.cachable", False)
    with pytest.raises(PermissionError, match=r"e/1\.tar"):
        url.download(tmp_path / "there")
    by_obstore._store.cache_clear()


def test_a_server_that_says_nothing(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    url = Url(s3.put("f/1.tar", DATA))
    monkeypatch.setattr(by_obstore, "_READ_S", 0.3)
    by_obstore._store.cache_clear()
    url.download(tmp_path / "there")
    s3.meddle = lambda method, path: "silence"
    with pytest.raises(OSError, match=r"f/1.tar: .*error sending request"):
        url.download(tmp_path / "there")
    by_obstore._store.cache_clear()


def test_downloads_by_http(tmp_path: Path, s3: S3Server) -> None:
    s3.put("g/1.tar", DATA)
    of_proxy, of_server = s3.environment["AWS_ENDPOINT_URL"], f"http://127.0.0.1:{s3.port}"
    signed = s3.client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "g/1.tar"})
    Url(signed).download(tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == DATA
    assert signed.startswith(of_server)
    url = Url(signed.replace(of_server, of_proxy))
    for fault in ("slow down", "cut"):
        s3.meddle = lambda method, path, fault=fault: fault
        with pytest.raises(OSError, match=f"{of_proxy}/bucket/g/1.tar"):
            url.download(tmp_path / "there")
