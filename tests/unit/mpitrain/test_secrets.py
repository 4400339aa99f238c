"""Secrets in the settings: the user's config.toml has them, and nothing else that a run writes, prints or sends."""

import base64
import http.server
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from run_with_secrets import SECRETS

import ckpt
from collectives.texts import shown, without_secrets
from mpitrain.config import Config, ConfigError, LogConfig, hidden, of_run, parse, public, to_toml
from mpitrain.data.cache import ShardCache
from mpitrain.data.open_shards import OpenShards
from mpitrain.data.shards import list_shards
from mpitrain.elastic.supervisor.words import on_event_of

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A web server with four files of documents. It asks for no password, and passes over parameters."""
    folder = tmp_path / "www"
    folder.mkdir()
    for name in "abcd":
        lines = (json.dumps({"text": f"words of {name}, number {number}. " * 5}) + "\n" for number in range(60))
        (folder / f"{name}.jsonl").write_text("".join(lines))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what is packed in it."""
    data = path.read_bytes()
    yield data
    for packed in re.findall(rb"[A-Za-z0-9+/]{200,}=*", data) if path.suffix == ".html" else ():
        yield zlib.decompress(base64.b64decode(packed))


def test_twelve_secrets_are_in_no_artefact_of_a_run(tmp_path: Path, address: str) -> None:
    """The second launch has another signature: it goes on with the same data, and no setting has changed but the steps."""
    pytest.importorskip("aiohttp")
    command = [sys.executable, str(HELPERS / "run_with_secrets.py"), str(tmp_path), address]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    settings = (tmp_path / "run/config.toml").read_text()
    assert (
        all(secret in settings for secret in SECRETS)
        and stat.S_IMODE((tmp_path / "run/config.toml").stat().st_mode) == 0o600
    )
    second = done.stdout.partition("SECOND LAUNCH")[2].partition("COMMANDS")[0]
    assert (
        re.findall("setting changed: .*", second) == ["setting changed: train.steps: 1 -> 2"] and "anew" not in second
    )
    kept = {tmp_path / "run/config.toml", *tmp_path.glob("settings-*.toml")}
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path not in kept]
    names = {path.name for path in files}
    assert {"manifest.jsonl", "index.h5", "report.html", "metrics.csv", "events.jsonl", "failure.txt"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    for where, data in [("what is printed", said.encode()), *((path, its) for path in files for its in contents(path))]:
        assert not re.search(rb"S3CRET\d\d", data), where
    checkpoint = ckpt.open(tmp_path / "run/checkpoints/step-00000002")
    for name in (name for name in checkpoint if name.startswith("data/") and checkpoint[name].dtype.name == "uint8"):
        assert b"S3CRET" not in zlib.decompress(checkpoint[name].read().tobytes()), name
    assert "on_event" not in checkpoint.meta["config"] and "http://***@127.0.0.1" in checkpoint.meta["config"]


def test_an_address_with_a_signature_has_documents(tmp_path: Path, address: str) -> None:
    pytest.importorskip("aiohttp")
    shards = list_shards([f"{address}/b.jsonl?X-Amz-Signature={SECRETS[11]}&part=1"])
    cut = OpenShards(shards, ShardCache(tmp_path / "cache").local).cut(0, 0, 1 << 30)
    assert len(cut) == 60 and cut.text(0) == b"words of b, number 0. " * 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pass@host/a.tar", "https://***@host/a.tar"),
        ("s3://KEY@bucket/run", "s3://***@bucket/run"),
        ("simplecache::https://u:p@ss@host/a", "simplecache::https://***@host/a"),
        ("zip://a.txt::https://u:p@h/x.zip?sig=1", "zip://a.txt::https://***@h/x.zip?sig=***"),
        ("https://h/a?X-Amz-Signature=1&part=2;token=3#4", "https://h/a?X-Amz-Signature=***&part=2;token=***#***"),
        ("https://h/a?secret", "https://h/a?***"),
        ("'https://h/a?key=1': not found; https://h/b", "'https://h/a?key=***': not found; https://h/b"),
        ("memory://h?k=a b", "memory://h?k=*** b"),
        ("mail to a@b, see https://h/@x/y, runs/a?b=c", "mail to a@b, see https://h/@x/y, runs/a?b=c"),
        # passwords with / ? # : @
        ("https://user:pa/ss@host/a.tar", "https://***@host/a.tar"),
        ("s3://AKIA:wJalr/K7MD+x@bucket/key", "s3://***@bucket/key"),
        ("https://user:p?ss@host/a", "https://***@host/a"),
        ("https://user:pa#ss@host/a", "https://***@host/a"),
        ("https://user:1/2@host/a", "https://***@host/a"),
        ("https://user:/pass@host/a", "https://***@host/a"),
        ("https://user:80/ss@data.example.com/a", "https://***@data.example.com/a"),
        ("s3://K:8080/abc@bucket/a", "s3://***@bucket/a"),
        ("https://u:p://x@h/a", "https://***@h/a"),
        ("https://u://x@h/a", "https://***@h/a"),
        ("https://user:119#ss@host/a", "https://***@host/a"),
        ("https://user:80#ss@host/a", "https://***@host/a"),
        ("https://user:119/ss@host/a", "https://***@host/a"),
        ("https://me@corp.com:pa/ss@host/a", "https://***@host/a"),
        ("https://u:p@ss/w@host/a", "https://***@host/a"),
        ("https://proxy/https://u:p/q@h/x", "https://proxy/https://***@h/x"),
        ("(https://u:p/q@h/a,https://u:p@h/b)", "(https://***@h/a,https://***@h/b)"),
        # an @ in a path
        ("https://u:p@host/x@1.tar", "https://***@host/x@1.tar"),
        ("https://u:p@host.com/v@1/a.tar", "https://***@host.com/v@1/a.tar"),
        ("https://u:p@host:8080/v@1/a.tar", "https://***@host:8080/v@1/a.tar"),
        ("https://host:8080/a?token=x@y", "https://host:8080/a?token=***"),
        # containers of Azure
        ("abfss://train@acct.dfs.core.windows.net/a.parquet?sig=1", "abfss://train@acct.dfs.core.windows.net/a.parquet?sig=***"),
        ("simplecache::wasbs://c@acct/a@b", "simplecache::wasbs://c@acct/a@b"),
        ("abfs://u:p@acct/a", "abfs://***@acct/a"),
        ("xabfs://c@acct/a", "xabfs://***@acct/a"),
        # parameters of paths, and addresses in parameters
        ("https://h/a;jsessionid=1/b;version=2?part=3", "https://h/a;jsessionid=***/b;version=2?part=3"),
        ("https://h/a?path=https://u:p@h2/&part=1", "https://h/a?path=***&part=1"),
        ("https://h/a?file=u%3Ap%40h&ref=https%3A%2F%2Fx&name=u%253Ap%2540h&id=a%20b", "https://h/a?file=***&ref=***&name=***&id=a%20b"),
    ],
)  # fmt: skip
def test_addresses_without_secrets(text: str, expected: str) -> None:
    assert without_secrets(text) == expected and without_secrets(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8080/a@b",
        "http://node17:8080/data@v1.2/a.tar",
        "http://127.0.0.1:8080/x@data.example.com/a",
        "http://localhost:80/x@data.example.com/a",
        "http://[::1]:8080/a@b/c",
        "http://[::1]/a@b/c",
        "s3://bucket/run:1@2/x",
        "file:///a:b@c",
        '{"url":"https://h:8080/a","mail":"x@y"}',
    ],
)
def test_addresses_with_an_at_and_no_user_stay(text: str) -> None:
    assert without_secrets(text) == text


def test_long_texts_take_little_time() -> None:
    began = time.perf_counter()
    for text in (
        "a" * 10**6 + "://",
        "://" * 300_000,
        "://h?" + ":" * 10**6 + "x",
        "://" + "@" * 10**6,
        "x://" + "?#" * 400_000,
        "x://u:p/" + "@a." * 300_000,
        "x://u:p@" + "a." * 500_000 + "1/@a." + "-a." * 300_000,
        "x://h/" + ";a" * 500_000,
        "://" + "::a" * 300_000,
        "://h?id=" + "%25" * 300_000,
    ):
        without_secrets(text)
    assert time.perf_counter() - began < 2


def test_control_characters_are_text() -> None:
    assert shown("a\x1b[2J\r\x07\u202e\udcff\n") == r"a\x1b[2J\r\x07\u202e\udcff\n"
    assert shown("a\n\tb\x00", lines=True) == "a\n\tb\\x00" and shown("ü 日本") == "ü 日本"


def test_spaces_and_joiners_of_all_scripts_are_text() -> None:
    for text in (
        "東京\u3000日本",
        "\xab\xa0déjà\xa0\xbb\u202f!",
        "می\u200cخواهم",
        "👩\u200d👩\u200d👧 ❤\ufe0f",
        "Silben\u00adtrennung",
    ):
        assert shown(text) == text and shown(f"{text}\n", lines=True) == f"{text}\n"
    for text in "\u200b\u200e\u202a\u202e\u2028\u2029\u2066\ufeff\ue000\ud800\u0378\x85\U000e0041":
        assert shown(text, lines=True) == text.encode("unicode_escape").decode()


def test_what_a_run_folder_says_is_no_command(tmp_path: Path) -> None:
    given = parse(["--log.on_event", "boom", "--log.modules", "x.py", "--data.path", "https://u:p@h/a.tar"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(given))
    found = of_run(file)
    assert found.log == LogConfig() and found.data.path == ("https://***@h/a.tar",) and hidden(found) == ["data.path"]
    assert public(given) == public(public(given)) and hidden(Config()) == []
    for words in (["--log.on_event", ":", "S3CRET"], ["--config", str(file)]):
        file.write_text('[log]\non_event = ["S3CRET"]\n')
        with pytest.raises(ConfigError, match=r"log\.on_event") as raised:
            parse(words)
        assert "S3CRET" not in str(raised.value)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="it is a pipe; expected a regular file"):
        of_run(file)


def test_an_evaluation_needs_the_addresses_of_the_data_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    words = [
        "--train.sample_prompt",
        "see https://x/a#History",
        "--log.project",
        "https://u@w/p",
        "--resume",
        "s3://k:s@b/r",
    ]
    given = parse([*words, "--checkpoint.copies", "memory://u:p@copies/run", str(tmp_path / "copies")])
    file.write_text(to_toml(given))
    found = of_run(file)
    assert hidden(found) == [] and found.resume == "auto" and found.checkpoint.copies == (str(tmp_path / "copies"),)
    again = parse(["--resume", "s3://k:s@b/r"], found)
    assert again.resume == "s3://k:s@b/r" and hidden(again) == []
    for words in (["--data.path", "https://h/a.jsonl?key=1"], ["--data.tokenizer", "https://u:p/q@h/tokenizer.json"]):
        file.write_text(to_toml(parse(words, given)))
        assert hidden(of_run(file)) == [words[0][2:]]


def test_the_supervisor_takes_its_command_from_the_words(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('run = "r"\n[log]\non_event = "of file"\n')
    assert on_event_of(["--config", str(file)]) == "of file"
    assert on_event_of(["--config", str(file), "--log.on-event", "a", "--log.on_event=b"]) == "b"
    assert (
        on_event_of(["--config", str(file), "--log.on-event", "none"]) is None and on_event_of(["--run", "x"]) is None
    )
