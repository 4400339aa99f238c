"""Secrets in the settings: the user's config.toml has them, and nothing else that a run writes, prints or sends."""

import base64
import fcntl
import gzip
import http.server
import json
import os
import random
import re
import stat
import string
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from run_with_secrets import SECRETS

import ckpt
from collectives.secret_forms import NAMED
from collectives.secret_tokens import TOKENS, Form
from collectives.texts import may_have_secrets, shown, without_secrets
from mpitrain.job.config import (
    Config,
    ConfigError,
    LogConfig,
    from_toml,
    hidden,
    of_run,
    parse,
    public,
    secrets,
    to_toml,
)
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.open_shards import OpenShards
from mpitrain.job.data.shards import list_shards
from mpitrain.job.elastic.supervisor.words import on_event_of

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


def wait_for_end_of(log: Path) -> None:
    """Wait until the program of a sink has ended, which holds a lock of its log."""
    until = time.monotonic() + 30
    with log.open() as file:
        while time.monotonic() < until:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
    raise TimeoutError(f"the program of {log} still writes")


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what is packed in it."""
    data = path.read_bytes()
    yield data
    if path.suffix == ".gz":
        yield gzip.decompress(data)
    for packed in re.findall(rb"[A-Za-z0-9+/]{200,}=*", data) if path.suffix == ".html" else ():
        yield zlib.decompress(base64.b64decode(packed))


@pytest.mark.rest
def test_twenty_secrets_are_in_no_artefact_of_a_run(tmp_path: Path, address: str) -> None:
    """The second launch has another signature: it goes on with the same data, and no setting has changed but the steps. It ends with an
    error of the user's code."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("wandb")
    environment = {name: its for name, its in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, str(HELPERS / "run_with_secrets.py"), str(tmp_path), address]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONPYCACHEPREFIX": ""},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    settings = (tmp_path / "run/config.toml").read_text()
    assert (
        all(secret in settings for secret in SECRETS[:17])
        and stat.S_IMODE((tmp_path / "run/config.toml").stat().st_mode) == 0o600
    )
    second = done.stdout.partition("SECOND LAUNCH")[2].partition("COMMANDS")[0]
    assert (
        re.findall("setting changed: .*", second) == ["setting changed: train.steps: 1 -> 3"] and "anew" not in second
    )
    kept = {tmp_path / "run/config.toml", tmp_path / "hooks.py", *tmp_path.glob("settings-*.toml")}
    wait_for_end_of(tmp_path / "run/wandb.log")
    of_user = tmp_path / "__pycache__"  # of hooks.py
    assert list(of_user.glob("hooks.*.pyc"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path not in kept and path.parent != of_user]
    names = {path.name for path in files}
    assert {"manifest.jsonl", "index.h5", "report.html", "metrics.csv", "events.jsonl", "failure.txt"} <= names
    for beginning in ("events.out.tfevents", "run-", "rank-"):  # of TensorBoard, of W&B, flight records
        assert any(name.startswith(beginning) for name in names), names
    for where, data in [("what is printed", said.encode()), *((path, its) for path in files for its in contents(path))]:
        assert not re.search(rb"S3CRET\d\d", data), where
    assert "OSError: cannot reach https://***@h/a, {" in (tmp_path / "run/failure.txt").read_text()
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


SECRET_TEXTS = [
    "sftp://us/er:S3CRET01@h.example/a",
    "WANDB_API_KEY: S3CRET01",
    "password: S3CRET01",
    "X-Amz-Signature=S3CRET01",
    "AZURE_STORAGE_KEY=S3CRET01",
    "SLACK_WEBHOOK=S3CRET01",
    "environ({'WANDB_API_KEY': 'S3CRET01', 'A': '1'})",
    "Server=h;User Id=u;Password=S3CRET01;",
    "postgres://u:S3CRET01@[::1]:5432/db?sslmode=require",
    "['--data.path', 'https://u:a S3CRET01@h/x']",
    "curl -H 'Authorization: Bearer S3CRET01'",
    "https://user:pa S3CRET01@host/a.tar",
    "https://u:S3CRET01 x@[::1]:80/a",
    "'https://u:a S3CRET01@h/x' is gone",
    '["https://u:a S3CRET01@h/x", "b"]',
    "--data.path='https://u:a S3CRET01@h/x'",
    "https://us/er:S3CRET01@host/a",
    "https://us/er:S3CRET01@data.example.com/a",
    "https%3A%2F%2Fu%3AS3CRET01%40h%2Fa",
    "https%253A%252F%252Fu%253AS3CRET01%2540h",
    "next=https%3A%2F%2Fh%2Fa%3Fsig%3DS3CRET01",
    "https://u:S3CRET01@[fe80::1%25eth0]:8080/a",
    "https://S3CRET01@host/a",
    "https://:S3CRET01@host/a",
    "https://S3CRET01:@host/a",
    "ssh://git:S3CRET01@h:22/x@v1",
    "git+https://S3CRET01@github.com/o/r@v1",
    "hf_S3CRET01abcdefghijklmnopqrstuvwx",
    "AKIAS3CRET01ABCDEFGH",
    "eyJhbGciOiJI.eyJS3CRET01.S3CRET01",
    "AWS_SECRET_ACCESS_KEY=S3CRET01",
    "HF_TOKEN=S3CRET01",
    "WANDB_API_KEY=S3CRET01",
    "export DB_PASSWORD='S3CRET01 x'",
    '"api_key": "S3CRET01"',
    "'password': 'S3CRET01'",
    '{"a":"{\\"password\\":\\"S3CRET01\\"}"}',
    'password = "S3CRET01"',
    "Authorization: Bearer S3CRET01",
    "Authorization: Basic S3CRET01==",
    '{"Authorization": "Bearer S3CRET01"}',
    "{'authorization': 'token S3CRET01'}",
    "-H 'Authorization: S3CRET01'",
    "Bearer S3CRET01",
    "X-Api-Key: S3CRET01",
    "Cookie: session=S3CRET01",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=S3CRET01==;EndpointSuffix=core",
    "https://a.blob.core.windows.net/c/b?sv=2022&st=2&se=3&sr=b&sp=r&sig=S3CRET01%3D",
    "?sv=2022&sig=S3CRET01",
    "SharedAccessSignature=S3CRET01",
    "GET /a.tar?X-Amz-Signature=S3CRET01&x=1",
    "--password S3CRET01",
    "--hf-token S3CRET01",
    "--token=S3CRET01",
    "-----BEGIN RSA PRIVATE KEY-----\nS3CRET01\n-----END RSA PRIVATE KEY-----",
    "https://hooks.slack.com/services/T0/B0/S3CRET01",
    "https://discord.com/api/webhooks/1/S3CRET01",
    "redis://:S3CRET01@h:6379/0",
    "postgresql://u:S3CRET01@h/db",
    "jdbc:postgresql://h/db?user=a&password=S3CRET01",
    "s3://KEY:S3CRET01@bucket/a",
    "https://h/a#S3CRET01",
    "https://h/a#access_token=S3CRET01",
    "s3://b/a#token=S3CRET01",
    "s3://b/a?token=S3CRET01",
    "user=a password=S3CRET01 host=b",
    "aws_secret_access_key = S3CRET01",
    "AWS_SESSION_TOKEN=S3CRET01",
    "client_secret=S3CRET01",
    "Proxy-Authorization: Basic S3CRET01",
    "sk-proj-S3CRET01abcdefghijklmnopqrstuvw",
    "ghp_S3CRET01abcdefghijklmnopqrstuvwxyz1234",
    "MYSQL_PWD=S3CRET01",
    "GITHUB_PAT=S3CRET01",
    "passwd: 'S3CRET01'",
    '"secret":"S3CRET01"',
    "b'password': b'S3CRET01'",
]
HONEST_TEXTS = [
    '{"url":"https://h/a","mail":"x@y"}',
    "[https://h/a,mail:x@y]",
    "<a href='https://h/a'>x:y@z</a>",
    "password: expected one",
    "data.tokenizer: a file",
    "secret: 3 of 5",
    "s3://bucket/x/y:z@v1",
    "hf://datasets/o/r@main/a:b",
    "file:///a/b:c@d",
    "s3://b/part#1",
    "s3://b/what?.jsonl",
    "s3://b/part-??.tar",
    "gs://b/a#b?c.json",
    "https://h/get?f=a",
    "https://h/get?page=3&file=x.jsonl",
    "file:///a#1",
    "the tokenizer has 50257 tokens; token=5, key=value",
    "EOS_TOKEN=</s>",
    "PAD_TOKEN=0",
    "max_tokens=128",
    "data.tokenizer=tok.json",
    "secret: none",
    "a password is expected",
    "Authorization: expected a header",
    "the secret=None",
    "hf_transformers",
    "sk-learn",
    "sort(key=lambda x: x)",
    "bearer of bad news",
    "xoxb",
    "X-Ray: on",
    "monkey=5",
    "keys=[1]",
    "s3://b/key=1/a.parquet",
    "git@github.com:org/repo",
    "https://h/a: mail to a@b",
    "https://h:8080 is down, mail x@y.z",
    "see http://x: a b@c",
    "https://h/@x/y",
    "https://github.com/org/repo@v1",
    "https://reg.io/org/img:tag@sha256:abc",
    "passed=3 passes=4",
    "--train.steps 3 --model.vocab 256",
    "cookie jar",
    "https://host/x?shard=3&offset=2",
    "python -m mpitrain --log.sinks wandb",
    "a%3Ab",
    "https%3A%2F%2Fh%2Fa",
    "compass=1",
    "s3://bucket/run:1@2/x",
    "PATH=/usr/bin:/bin",
    "_PATH=/x",
    "SEP_TOKEN=x",
    "train.token_type=3",
    "keyboard=x",
    "sasl=1",
    "s3://b/part#1/a@b",
    "https://h/x/a:b",
    "{'token': 'the', 'key': 'x'}",
    "SORT_KEY=name",
    "PRIMARY_KEY: id",
    "EOT_TOKEN=<|endoftext|>",
    "IMAGE_TOKEN: <image>",
    "START_TOKEN=1",
    "BOS_TOKEN=1",
    "OMP_STACK_PASS=3",
    "HF_TOKEN: set it",
    "HF_TOKEN is not set",
    "GROUP_BY_KEY=user_name_2",
    "CACHE_KEY=/data/cache/0123456789",
    "xoxb-20240101_run_of_data",
    "/data/xoxp-2024-01-01",
    "s3://b/en-sk-opus_corpora_train_dataset_v1/0.jsonl",
    "/models/hf_Qwen2TokenizerFastVersion1/tokenizer.json",
    "/models/hf_LlamaTokenizerFastForCausalLanguageModels2",
    "pypi-simple_repository_mirror_of_packages_2024_01",
    "sk-ICCV2023_ResNet50_ImageNet1K_V2_A100_BF16",
    "sk-3f2a9c1e-7b4d-4e8f-9a6b-0c1d2e3f4a5b.jsonl",
    "data/sk-0123456789abcdef0123456789abcdef01234567.tar",
    "gho_0123456789abcdef0123456789abcdef01234567",
    "bWFueSBoYW5kcyBtYWtlIGxpZ2h0IHdvcmsu.bin",
    "run-20240101T101112Z-A100x8-bs4096-lr3e-4",
    "node-gpu-h100-0017.cluster.example.com",
    "cookie: eat it",
    "a--dash and --more-tokens 5",
    "-" * 100,
]
WORDS = [
    "data", "train", "wiki", "dump", "clean", "sk", "en", "de", "opus", "corpora", "learn", "hf", "Qwen2", "Tokenizer", "Fast",
    "Version1", "model", "run", "exp", "gpt2", "Llama3", "8B", "Instruct", "2024", "01", "20240101", "step-00001000", "A100",
    "H100", "fp16", "BF16", "lr3e-4", "bs256", "seed0", "final", "best", "pair", "shuffled", "WMT14", "EN", "BPE32K", "c4",
    "text", "classification", "dataset",
]  # fmt: skip
BEGINNINGS = [
    "sk-", "hf_", "ghp_", "ghs_", "pypi-", "xoxb-", "xoxp-2-", "npm_", "wandb_v1_", "github_pat_", "ya29.", "AKIA", "ASIA",
    "AIza", "eyJ", "dop_v1_", "en-sk-",
]  # fmt: skip


def test_secrets_in_other_forms_are_hidden() -> None:
    """In addresses, lists, dicts, JSON, words of commands, variables, headers and connection strings, and by their own form."""
    for text in SECRET_TEXTS:
        public = without_secrets(text)
        assert "S3CRET" not in public and without_secrets(public) == public, text
    joined = "; ".join(text for text in SECRET_TEXTS if " " not in text)
    assert "S3CRET" not in without_secrets(joined)


def test_parts_of_an_address_that_a_library_repeats_are_hidden() -> None:
    address = "https://ann:pa%73sw@host/data/x?token=Zm9vYmFy&part=1&sv=403"
    said = "ann is not known at host; pa%73sw (passw), Zm9vYmFy and data/x, part=1, annual error 403"
    assert (
        without_secrets(said, of=address)
        == "*** is not known at host; *** (***), *** and data/x, part=1, annual error 403"
    )
    assert without_secrets("my-key is there", of="s3://u:key@bucket/my-key") == "my-key is there", (
        "shown in the address"
    )
    assert without_secrets(said, of="https://host/data") == said
    assert without_secrets("a b", of="s3://a:b@bucket/c") == "a b", "no text has single letters as a secret"
    pytest.importorskip("fsspec")
    error = ckpt.Url("s3://AKIA:SECRETK@bucket/a")._named(ValueError('Invalid bucket name "AKIA:SECRETK@bucket"'))
    assert str(error) == 's3://***@bucket/a: ValueError: Invalid bucket name "***@bucket"'


def test_honest_texts_stay() -> None:
    assert [text for text in HONEST_TEXTS if without_secrets(text) != text] == []


def test_names_of_files_that_begin_as_tokens_stay() -> None:
    draw = random.Random(0)
    names = []
    for _ in range(3000):
        digest, number = f"{draw.getrandbits(160):040x}", str(uuid.UUID(int=draw.getrandbits(128)))
        words = draw.choices(WORDS, k=draw.randint(1, 9)) + draw.choice([[], [], [digest], [digest[:7]], [number]])
        name = draw.choice(BEGINNINGS) + draw.choice(["_", "-", "__", "/"]).join(words)
        folder, end = (
            draw.choice(["", "/data/", "s3://b/", "hf://datasets/o/"]),
            draw.choice(["", ".jsonl", "/0.tar", "/"]),
        )
        names.append(folder + name + end)
    assert [name for name in names if without_secrets(name) != name] == []


@pytest.mark.parametrize("form", [*TOKENS, *NAMED], ids=lambda form: form.name)
def test_the_examples_of_a_form(form: Form) -> None:
    """What is hidden is so in any place. What stays has the words, or is short of them."""
    found = re.search(form.pattern, form.hidden)
    assert found and any(word in form.hidden.lower() for word in form.words.split())
    for text in (form.hidden, f"a ({form.hidden})", f"['{form.hidden}', 1]", f"see {form.hidden}; x"):
        assert found["secret"] not in without_secrets(text) and without_secrets(
            without_secrets(text)
        ) == without_secrets(text)
        assert may_have_secrets(text)
    assert [text for text in form.stay if without_secrets(text) != text] == []


def test_tokens_that_are_drawn_are_hidden() -> None:
    """Of 1000 tokens of each form, a few look like words."""
    draw = random.Random(0)
    letters, digits, capitals = (
        string.ascii_letters,
        string.ascii_letters + string.digits,
        string.ascii_uppercase + "234567",
    )
    hexes, all_ = "0123456789abcdef", digits + "-_"
    kinds = {"hf_#": (letters, 34), "sk-#": (digits, 48), "sk-proj-#": (all_, 48), "sk-svcacct-#": (all_, 74), "ghp_#": (digits, 36),
             "npm_#": (digits, 36), "github_pat_#": (digits, 82), "sk-or-v1-#": (hexes, 64), "xoxb-1234567890-12345678-#": (digits, 24),
             "glpat-#": (all_, 20), "glpat-#.01.0w1a2b3c4": (all_, 27), "ya29.a0#": (all_, 60), "a bad key: sk-#.": (hexes, 32),
             "ASIA#": (capitals, 16), "AKIA#": (capitals, 16)}  # fmt: skip
    for form, (characters, num) in kinds.items():
        tokens = [form.replace("#", "".join(draw.choices(characters, k=num))) for _ in range(1000)]
        assert sum(without_secrets(token) == token for token in tokens) <= 15, form
    assert without_secrets(f"see glpat-{'aB3xY' * 5}Zq.01.0w1a2b3c4.") == "see ***."


def test_long_texts_take_little_time() -> None:
    began = time.process_time()
    for text in (
        "a" * 50_000 + "://",
        "://" * 15_000,
        "://h?" + ":" * 50_000 + "x",
        "://" + "@" * 50_000,
        "x://" + "?#" * 20_000,
        "x://u:p/" + "@a." * 15_000,
        "x://u:p@" + "a." * 50_000 + "1/@a." + "-a." * 15_000,
        "x://h/" + ";a" * 50_000,
        "://" + "::a" * 15_000,
        "://h?id=" + "%25" * 15_000,
        "=x://u:p " * 7_000,
        "%253A%252F%252F" * 7_000,
        "-----BEGIN PRIVATE KEY-----" * 3_000,
        "-" * 300_000,  # 14 us a character if each dash began a flag
        "--a." * 25_000,
        "--" + "-a" * 50_000,
        "x-" * 50_000,
        "-eyJ" * 25_000,
        "sk-" * 30_000,
        "github_pat_" * 10_000,
        "?a" * 50_000,
        "authorization:" * 7_000,
        "eyJaaaaaaaa." * 10_000,
        "password='" * 10_000,
    ):
        without_secrets(text)
    assert time.process_time() - began < 3  # minutes if one were quadratic


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


def test_the_search_in_the_settings_of_a_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are not searched any more are hidden, and settings of many shards are not so long."""
    monkeypatch.setattr(secrets, "_MOST_SEARCHED", 400_000)
    file = tmp_path / "config.toml"
    shards = [f"s3://bucket/data/train/part-{number:06}-of-100000.jsonl.zst" for number in range(20_000)]
    file.write_text(f"[data]\npath = {json.dumps(shards)}\n")
    assert list(of_run(file).data.path) == shards
    longs = [f"API_KEY=S3CRET01 {'a' * 39_980}{number:03}" for number in range(12)]
    file.write_text(f"[data]\npath = {json.dumps(['a.jsonl', *longs])}\n")
    found = of_run(file)
    assert (
        found.data.path[11:] == ("***", "***")
        and found.data.path[0] == "a.jsonl"
        and "S3CRET" not in str(found.data.path)
    )
    assert found.data.path[10].startswith("API_KEY=*** a") and hidden(found) == ["data.path"]


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
    file.chmod(0o644)
    assert on_event_of(["--config", str(file)]) == "of file"
    assert on_event_of(["--config", str(file), "--log.on-event", "a", "--log.on_event=b"]) == "b"
    assert (
        on_event_of(["--config", str(file), "--log.on-event", "none"]) is None and on_event_of(["--run", "x"]) is None
    )


CODE = {"log.on_event": 'on_event = "id"', "log.modules": 'modules = ["a.py"]'}


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize(
    "way",
    [
        "others",
        "group",
        "folder",
        "another",
        "linked",
        "ours",
        "own",
        "sticky",
        "theirs",
        "their_link",
        "their_way",
        "twice",
    ],
)
def test_code_is_taken_only_from_a_file_that_nobody_else_can_write(tmp_path: Path, name: str, way: str) -> None:
    if (way in ("another", "twice") or way.startswith("their")) and os.geteuid():
        pytest.skip("needs root")
    above = tmp_path / "above"
    above.mkdir(mode=0o755)
    file = above / "run.toml"
    file.write_text(f"[log]\n{CODE[name]}\nevery = 7\n")
    file.chmod({"others": 0o646, "group": 0o664}.get(way, 0o644))
    above.chmod({"folder": 0o777, "linked": 0o775, "sticky": 0o1777}.get(way, 0o755))
    if way == "another":
        os.chown(file, 65534, -1)
    named = file
    if way == "linked":
        named = tmp_path / "link.toml"
        named.symlink_to(file)
    if way == "ours":
        named = tmp_path / "link.toml"
        named.symlink_to("../" + tmp_path.name + "/above/./run.toml")
    if way in ("theirs", "twice"):  # a link in a folder of another user
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o755)
        named = theirs / "link.toml"
        named.symlink_to(file)
        os.chown(theirs, 65534, -1)
        if way == "twice":
            (tmp_path / "own.toml").symlink_to(named)
            named = tmp_path / "own.toml"
    if way in ("their_link", "their_way"):  # a link of another user in a folder such as /tmp
        tmp_path.chmod(0o1777)
        (tmp_path / "link").symlink_to(file if way == "their_link" else above)
        os.chown(tmp_path / "link", 65534, -1, follow_symlinks=False)
        named = tmp_path / "link" / ("" if way == "their_link" else file.name)
    words = ["--config", str(named)]
    flag = f"--{name.replace('_', '-')}"
    if way in ("ours", "own", "sticky"):
        assert parse(words).log.every == 7
        assert on_event_of(words) == ("id" if name == "log.on_event" else None)
    else:
        message = f"{name} in .*{named.name}: it is code, .* but (it belongs to|others can).*; give {flag} on the command line"
        for read in (parse, lambda words: from_toml(named), *[on_event_of][: name == "log.on_event"]):
            with pytest.raises(ValueError, match=message):
                read(words)
        assert parse([*words, flag, "none" if name == "log.on_event" else "b.py"]).log.every == 7
        assert on_event_of([*words, flag, "b"]) == ("b" if name == "log.on_event" else None)
    if name == "log.modules":  # nothing else in such a file is code
        file.write_text("[log]\nevery = 8\n")
        assert parse(words).log.every == 8


def test_the_supervisor_runs_no_command_of_a_folder_or_of_a_file_of_others(tmp_path: Path) -> None:
    run, ran = tmp_path / "run", tmp_path / "ran"
    run.mkdir()
    for file in (run / "config.toml", tmp_path / "open.toml"):
        file.write_text(f'run = "{run}"\n[log]\non_event = "touch {ran}"\n')
        file.chmod(0o666)
    words = [
        sys.executable,
        "-m",
        "mpitrain",
        "elastic",
        "--run",
        str(run),
        "--max-relaunches",
        "0",
        "--",
        "sh",
        "-c",
        "exit 1",
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    results = [
        subprocess.run([*words, *more], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
        for more in ([], ["sh", "--config", "open.toml"])
    ]
    assert [result.returncode for result in results] == [1, 2]
    assert "elastic: error: log.on_event in open.toml: it is code" in results[1].stderr
    assert not ran.exists()
