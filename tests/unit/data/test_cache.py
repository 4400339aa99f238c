"""Shards that are remote or compressed: fetched once, within a limit, whole or not at all."""

import gzip
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import numpy as np
import pytest
from launching import ROOT
from s3_server import Fault, S3Server

from ckpt import Url
from ckpt.storage.file_info import FileInfo, version_of
from mpitrain.job.config import DataConfig
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import DamagedShardError
from mpitrain.job.data.loading import say_what_stays
from mpitrain.job.data.shards import list_shards

DATA = bytes(range(256)) * 40
OWN = f"mpitrain-shards-{os.getuid()}"


@pytest.fixture
def bucket() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for number in range(4):
        memory.pipe(f"/cached/{number}.tar", DATA + bytes([number]))
    yield "memory://cached"
    memory.rm("/cached", recursive=True)


def read(cache: ShardCache, shard: str, size: int) -> bytes:
    with cache.local(shard, size) as path:
        return path.read_bytes()


def test_a_file_of_this_machine_is_used_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    cache = ShardCache(tmp_path / "cache")
    with cache.local(str(tmp_path / "a.tar"), len(DATA)) as path:
        assert path == tmp_path / "a.tar"
    assert not (tmp_path / "cache").exists()


def test_a_remote_shard_comes_once(tmp_path: Path, bucket: str) -> None:
    cache, other = ShardCache(tmp_path / "cache"), ShardCache(tmp_path / "cache")
    size = len(DATA) + 1
    assert read(cache, f"{bucket}/1.tar", size) == DATA + b"\x01" == read(other, f"{bucket}/1.tar", size)
    assert (cache.num_fetched, other.num_fetched) == (1, 0)
    assert oct((tmp_path / "cache" / OWN).stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize("place", ["file", "memory", "s3"])
def test_a_shard_that_was_replaced_by_one_of_the_same_size(
    tmp_path: Path, bucket: str, place: str, request: pytest.FixtureRequest
) -> None:
    if place == "s3":
        s3: S3Server = request.getfixturevalue("s3")
    folder = {"file": f"file://{tmp_path}", "memory": bucket, "s3": "s3://bucket/replaced"}[place]

    def write(data: bytes) -> None:
        if place == "s3":
            s3.put("replaced/9.tar", data)
        else:
            fsspec.filesystem(place).pipe(f"{folder}/9.tar", data)

    def found(pattern: str, cache: str = "cache") -> bytes:
        shards = list_shards([f"{folder}/{pattern}"])
        (path,) = (path for path in shards.paths if path.endswith("9.tar"))
        with ShardCache(tmp_path / cache, versions=shards.versions).local(path, len(DATA)) as local:
            return local.read_bytes()

    patterns = ("9.tar", "9*.tar", "{9,9,9,9,9,9,9,9,9}.tar")  # asked for alone, by a glob, in a list of the folder
    write(DATA)
    versions = [set(list_shards([f"{folder}/{pattern}"]).versions.values()) for pattern in patterns]
    assert [found(pattern) for pattern in patterns] == [DATA] * 3
    assert len(set.union(*versions)) == 1, "a version is the same however it was asked for"
    write(DATA[::-1])
    assert [found(pattern) for pattern in patterns] == [DATA[::-1]] * 3
    listed = list_shards([f"{folder}/9.tar"])
    write(DATA)
    cache = ShardCache(tmp_path / "other", versions=listed.versions)
    with pytest.raises(
        DamagedShardError, match=r"9.tar: it was replaced since the start: expected version .*; start again"
    ):
        read(cache, listed.paths[0], len(DATA))


def test_a_signature_that_is_made_anew_fetches_nothing(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store tells versions. Else the same size may be that of another file."""
    fetched = []

    def download(url: Url, path: Path, *, asks_version: bool = False) -> str:
        fetched.append(os.fspath(url))
        path.write_bytes(DATA)
        return ""

    monkeypatch.setattr(Url, "download", download)
    for name, signed, versions, num in (
        ("a", "https://u:{}@h/a.tar?X-Amz-Date={}&X-Amz-Signature={}", ("v1", "v1"), 1),
        ("b", "https://h/a.tar?sv=2022&se={}&sig={}#{}", ("v1", "v1"), 1),
        ("c", "https://h/a.tar?sig={}{}{}", ("v1", "v2"), 2),
        ("d", "https://h/a.tar?sig={}{}{}", ("", ""), 2),
        ("e", "https://h/get?blob={}{}{}", ("v1", "v1"), 2),
    ):
        fetched.clear()
        for number, version in enumerate(versions):
            shard = signed.format(number, number, number)
            cache = ShardCache(tmp_path / name, versions={shard: version} if version else {})
            assert read(cache, shard, len(DATA)) == DATA
        assert len(fetched) == num, name


@pytest.mark.parametrize(
    "entry",
    [
        {"last_modified": "2026-11-28T10:00:00Z"},
        {"mtime": 1764324000.0, "ino": 7},
        {"ETag": 'W/"5f3a"'},
        {"ETag": f'"692974a0-{len(DATA):x}"'},  # nginx: time and size
        {"ETag": f'"{len(DATA):X}-6449F0A1B2C3D"'},  # Apache
        {},
    ],
)
@pytest.mark.parametrize("url", ["https://h/a.tar?token={}", "https://h/get?pass={}", "https://{}:p@h/a.tar"])
def test_two_files_that_a_token_tells_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: dict[str, object], url: str
) -> None:
    """With one size and one time they are two files, unless a version of the contents says otherwise."""

    def download(url: Url, path: Path, *, asks_version: bool = False) -> str:
        path.write_bytes(DATA if "fileA" in os.fspath(url) else DATA[::-1])
        return version_of(entry)

    monkeypatch.setattr(Url, "download", download)
    for name, data in (("fileA", DATA), ("fileB", DATA[::-1])):
        shard = url.format(name)
        cache = ShardCache(tmp_path, versions={shard: version_of(entry)} if entry else {})
        assert read(cache, shard, len(DATA)) == data


def test_a_store_that_says_two_versions_of_a_file(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = list_shards([f"{bucket}/1.tar"])
    whole = Url.download
    monkeypatch.setattr(Url, "download", lambda *args, **known: whole(*args, **known) + " as it is downloaded")
    assert read(ShardCache(tmp_path, versions=shards.versions), shards.paths[0], len(DATA) + 1) == DATA + b"\x01"


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, OSError, None])
def test_a_store_that_tells_versions_but_no_list(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    """As most web servers. `error`: of its list; None: of the first question for the version of a file, which is asked again."""
    shards = list_shards([f"{bucket}/1.tar"])
    whole, info, asked = Url.download, Url.info, list[Url]()

    def no_list(self: Url) -> None:
        raise (error or FileNotFoundError)("no list")

    def busy(self: Url) -> FileInfo:
        asked.append(self)
        if error is None and len(asked) == 1:
            raise OSError("503")
        return info(self)

    monkeypatch.setattr("mpitrain.job.data.cache._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(Url, "download", lambda *args, **known: whole(*args, **known) + " as it is downloaded")
    monkeypatch.setattr(Url, "infos", no_list)
    monkeypatch.setattr(Url, "info", busy)
    cache = ShardCache(tmp_path / "1", versions=shards.versions, patience_s=0.05)
    assert read(cache, shards.paths[0], len(DATA) + 1) == DATA + b"\x01"
    other = ShardCache(tmp_path / "2", versions={shards.paths[0]: "an old version"}, patience_s=0.05)
    expected = (
        (OSError, "cannot be fetched within 0.05 s: no list")
        if error is OSError
        else (DamagedShardError, "was replaced")
    )
    with pytest.raises(expected[0], match=expected[1]):
        read(other, shards.paths[0], len(DATA) + 1)


def test_a_compressed_file_that_was_replaced_by_one_of_the_same_size_and_time(tmp_path: Path) -> None:
    cache, shard = ShardCache(tmp_path / "cache"), tmp_path / "a.jsonl.gz"
    for data in (b"first ", b"second"):
        shard.write_bytes(gzip.compress(data, compresslevel=0))
        os.utime(shard, (1_700_000_000, 1_700_000_000))
        time.sleep(0.02)  # the clock of a file system has steps of some milliseconds
        assert read(cache, str(shard), shard.stat().st_size) == data


def test_the_limit_removes_what_was_used_last(tmp_path: Path, bucket: str) -> None:
    size = len(DATA) + 1
    cache = ShardCache(tmp_path / "cache", limit_bytes=2 * size)
    for number in (0, 1):
        read(cache, f"{bucket}/{number}.tar", size)
    for file in (tmp_path / "cache" / OWN).iterdir():
        os.utime(file, (time.time() - 100, time.time() - 100))
    read(cache, f"{bucket}/0.tar", size)
    with cache.local(f"{bucket}/0.tar", size) as in_use:
        assert read(cache, f"{bucket}/2.tar", size) == DATA + b"\x02"
        assert in_use.exists()
    assert sum(not file.suffix for file in (tmp_path / "cache" / OWN).iterdir()) == 2
    read(cache, f"{bucket}/0.tar", size)
    assert cache.num_fetched == 3, "shard 1 made room"


def test_a_shard_of_another_size_is_damaged(tmp_path: Path, bucket: str) -> None:
    cache = ShardCache(tmp_path / "cache")
    with pytest.raises(DamagedShardError, match=rf"{bucket}/0.tar: expected 5 bytes as listed, got {len(DATA) + 1}"):
        read(cache, f"{bucket}/0.tar", 5)
    assert [file.suffix for file in sorted((tmp_path / "cache" / OWN).iterdir())] == [".failed", ".lock"]


def test_other_files_in_the_folder_stay(tmp_path: Path, bucket: str) -> None:
    (tmp_path / "thesis").write_text("all work")
    cache = ShardCache(tmp_path, limit_bytes=len(DATA) + 1)
    for number in range(3):
        (tmp_path / OWN).mkdir(mode=0o700, exist_ok=True)
        (tmp_path / OWN / "notes").write_text("no play")
        (tmp_path / OWN / f"{number:032x}.part").write_text("of a killed rank")
        read(cache, f"{bucket}/{number}.tar", len(DATA) + 1)
    assert (tmp_path / "thesis").exists() and (tmp_path / OWN / "notes").exists()
    assert not list((tmp_path / OWN).glob("*.part"))


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, bucket: str) -> None:
    (tmp_path / "theirs").mkdir(mode=0o777)
    for make in (lambda own: own.symlink_to(tmp_path / "theirs"), lambda own: own.mkdir(mode=0o755)):
        make(tmp_path / OWN)
        with pytest.raises(OSError, match=r"is not a folder of this user alone; expected mode 0700"):
            read(ShardCache(tmp_path), f"{bucket}/1.tar", len(DATA) + 1)
        (tmp_path / OWN).unlink() if (tmp_path / OWN).is_symlink() else (tmp_path / OWN).rmdir()


def test_compressed_shards_are_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(DATA))
    cache, size = ShardCache(tmp_path / "cache"), (tmp_path / "a.jsonl.gz").stat().st_size
    for _ in range(2):
        assert read(cache, str(tmp_path / "a.jsonl.gz"), size) == DATA
    assert cache.num_fetched == 1
    zstandard = pytest.importorskip("zstandard")
    frames = b"".join(zstandard.ZstdCompressor().compress(DATA[at : at + 1000]) for at in range(0, len(DATA), 1000))
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    assert read(cache, str(tmp_path / "a.jsonl.zst"), len(frames)) == DATA


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damaged_and_endless_compressed_shards(tmp_path: Path, ending: str) -> None:
    pack = (
        gzip.compress
        if ending == "gz"
        else pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress
    )
    packed, some = pack(bytes(50 << 20)), pack(np.random.default_rng(0).bytes(100_000))
    cache = ShardCache(tmp_path / "cache", limit_bytes=1 << 20)
    for name, data, text in (
        (f"bomb.tar.{ending}", packed, "it unpacks to more than 1048576 bytes"),
        (f"cut.tar.{ending}", some[:-10], "it cannot be unpacked"),
        (f"changed.tar.{ending}", some[:500] + bytes(100) + some[600:], "it cannot be unpacked"),
        (f"no.tar.{ending}", b"all work and no play", "it cannot be unpacked"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DamagedShardError, match=f"{name}: {text}"):
            read(cache, str(tmp_path / name), len(data))
    assert {file.suffix for file in (tmp_path / "cache" / OWN).iterdir()} == {".lock", ".failed"}


def test_errors_of_a_server_are_tried_again(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, size = s3.put("again/3.tar", DATA), len(DATA)
    monkeypatch.setattr("mpitrain.job.data.cache._FIRST_PAUSE_S", 0.01)
    faults: list[Fault | None] = ["slow down", "cut", None]
    s3.meddle = lambda method, path: faults.pop(0) if method == "GET" else None
    assert read(ShardCache(tmp_path / "1"), shard, size) == DATA
    assert s3.gets() == ["again/3.tar"] * 3
    s3.meddle = lambda method, path: "slow down"
    with pytest.raises(OSError, match=rf"data: {shard} cannot be fetched within 0.05 s: .* reduce your request rate"):
        read(ShardCache(tmp_path / "2", patience_s=0.05), shard, size)
    s3.meddle = lambda method, path: None
    with pytest.raises(OSError, match=r"9.tar cannot be fetched: .*No such file"):
        read(ShardCache(tmp_path / "3"), "s3://bucket/again/9.tar", 1)


def test_a_shard_that_arrives_damaged_is_fetched_again(tmp_path: Path, s3: S3Server) -> None:
    shard, checksum = s3.put("once/1.tar", b"wrong"), hashlib.sha256(b"right").digest()

    def mend(method: str, path: str) -> None:
        if len(s3.gets()) == 2:
            s3.put("once/1.tar", b"right")

    s3.meddle = mend
    assert read(ShardCache(tmp_path / "1", checksums={shard: checksum}), shard, 5) == b"right"
    assert len(s3.gets()) == 2


def test_processes_that_need_the_same_shard_fetch_it_once(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl.gz").write_bytes(gzip.compress(DATA))
    program = (
        "import sys\nfrom mpitrain.job.data.cache import ShardCache\ncache = ShardCache(sys.argv[1])\n"
        "with cache.local(sys.argv[2], int(sys.argv[3])) as path:\n    print(cache.num_fetched, len(path.read_bytes()))"
    )
    shard = tmp_path / "good.jsonl.gz"
    words = [sys.executable, "-c", program, str(tmp_path), str(shard), str(shard.stat().st_size)]
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)) for _ in range(3)
        ]
        said = sorted(job.communicate(timeout=60)[0].strip() for job in jobs)
    assert said == [f"0 {len(DATA)}"] * 2 + [f"1 {len(DATA)}"]


def test_a_rank_that_has_waited_for_a_failure_does_not_try_again(tmp_path: Path, bucket: str) -> None:
    cache = ShardCache(tmp_path)
    with pytest.raises(OSError, match=r"9.tar cannot be fetched: .*No such file"):
        read(cache, f"{bucket}/9.tar", 7)
    (failed,) = (tmp_path / OWN).glob("*.failed")
    for kind in (OSError, DamagedShardError):
        failed.write_text(f"{kind.__name__} what another rank has found")
        os.utime(failed, (time.time() + 100, time.time() + 100))  # later than this rank has begun to wait
        with pytest.raises(kind, match=r"^what another rank has found$"):
            read(cache, f"{bucket}/9.tar", 7)
    os.utime(failed, (0, 0))
    fsspec.filesystem("memory").pipe("/cached/9.tar", DATA[:7])
    assert read(cache, f"{bucket}/9.tar", 7) == DATA[:7] and not failed.exists()


@pytest.mark.parametrize("job", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", None])
def test_a_batch_job_says_what_it_leaves(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    if job:
        monkeypatch.setenv(job, "7")
    (tmp_path / "plain.jsonl").write_text("{}\n")
    remote, local = list_shards((f"{bucket}/*.tar",)), list_shards((str(tmp_path / "plain.jsonl"),))
    config = DataConfig(cache=str(tmp_path / "\x1b[2J"), cache_bytes=10**6)

    def said(lists: tuple = (local, remote), *, speaks: bool = True) -> str:
        say_what_stays(config, lists, speaks=speaks)
        return capsys.readouterr().err

    assert said() == "", "no folder is there"
    cache = ShardCache(config.cache)
    for number in range(3):
        read(cache, f"{bucket}/{number}.tar", len(DATA) + 1)
    text = said()
    assert text.count("\n") == bool(job)
    if job:
        folder = f"{tmp_path}/\\x1b[2J/{OWN} on {os.uname().nodename}"
        assert f"leaves {folder}: 3 shards, {3 * (len(DATA) + 1):,} bytes" in text and "at most 1,000,000" in text
    assert said(speaks=False) == said((local,)) == "", "one process speaks, and only of what its job needs"
    own = tmp_path / "\x1b[2J" / OWN
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    assert said() == "", "a link is no folder of the cache"
