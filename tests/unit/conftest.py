"""An S3 server for the tests that need one, and property tests without a deadline for each example."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from s3_server import S3Server, s3_server

# A pause of a busy machine is no fault; the watchdog of tests/conftest.py ends what hangs.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture(scope="session")
def running_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server without faults that the environment names, with a bucket "bucket". All tests have the same one."""
    for name, value in running_s3.environment.items():
        monkeypatch.setenv(name, value)
    running_s3.requests.clear()
    yield running_s3
    running_s3.meddle = lambda method, path: None
