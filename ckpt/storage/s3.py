"""Files in S3 by obstore, where it is installed, in place of fsspec's s3fs: one request for each, outside Python's lock.

The endpoint, the region, and the keys are those that botocore finds, as for s3fs: in the environment, in ~/.aws, or from the machine.
"""

import errno
import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

_PIECE_BYTES = 4 << 20
_CONNECT_S, _READ_S = 10, 30  # a server that says nothing for so long does not answer
_ASK_AGAIN = timedelta(
    minutes=10
)  # for temporary keys; obstore asks some minutes earlier, and botocore has new ones by then
_BUCKET = re.compile(r"(?!.*--)[a-z0-9][a-z0-9.-]+")  # others are access points, or buckets of another kind
_NOT_IN_KEYS = ("//", "/./", "/../", "?versionId=")


def download(path: str, target: Path) -> str | None:
    """Write the bytes of an object, BUCKET/KEY, to a file, by one request without a second try. Returns their ETag; "": there is none.

    Returns None, and writes nothing, if obstore is not installed, or does not support what the user has set.
    OSError with one line for errors of the server: with ENOENT if there is no such object, with EACCES if it is not allowed.
    """
    try:
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
    except ImportError:
        return None
    bucket, _, key = path.partition("/")
    if not _BUCKET.fullmatch(bucket) or any(part in path for part in _NOT_IN_KEYS) or (store := _store(bucket)) is None:
        return None
    with target.open("wb") as file:
        try:
            got = obstore.get(store, key)
            etag = got.meta["e_tag"] or ""
            for piece in got.stream(_PIECE_BYTES):
                file.write(piece)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object") from None
        except BaseError as error:
            line = str(error).partition("\n")[0].removesuffix('<?xml version="1.0" encoding="UTF-8"?>')
            if isinstance(error, PermissionDeniedError | UnauthenticatedError):
                raise PermissionError(errno.EACCES, line) from None
            raise OSError(line) from None
    return etag


@lru_cache(maxsize=16)
def _store(bucket: str) -> Any:
    """The bucket for obstore; None if there are no keys, or settings that fsspec alone knows."""
    import botocore.session
    import fsspec
    from botocore.config import Config
    from botocore.exceptions import ClientError
    from obstore.store import S3Store

    session = botocore.session.get_session()
    found = session.get_credentials()
    if found is None or fsspec.config.conf.get("s3"):
        return None

    def keys() -> Any:
        now = found.get_frozen_credentials()  # it renews them if need be
        until = datetime.now(UTC) + _ASK_AGAIN if now.token else None  # without a token they stay as they are
        names = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
        return {**names, "expires_at": until}

    config = Config(connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries={"max_attempts": 0})
    client = session.create_client("s3", config=config)
    try:
        head = client.head_bucket(Bucket=bucket)
    except ClientError as error:  # without the permission, the answer also names the region
        head = error.response
    region = head["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", client.meta.region_name)
    client = session.create_client("s3", region_name=region)  # of AWS, each region has its own endpoint
    http: dict[str, Any] = {
        "allow_http": client.meta.endpoint_url.startswith("http:"),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=_READ_S),
        "timeout": timedelta(days=365),  # of a whole object; obstore's 30 s are too short for large ones
    }
    if bundle := session.get_config_variable("ca_bundle"):
        http["root_certificate"] = Path(bundle).read_bytes()
    settings: dict[str, Any] = {"endpoint": client.meta.endpoint_url, "region": region, "client_options": http}
    return S3Store(bucket, **settings, credential_provider=keys, retry_config={"max_retries": 0})
