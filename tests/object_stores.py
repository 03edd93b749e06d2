"""Object stores for tests: a real S3 server on the loopback, in this process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

BUCKET = "bucket"
SECRET = "a-secret-that-nobody-may-see"


@contextmanager
def s3_server() -> Iterator[str]:
    """Context manager in which an S3 server has an empty bucket, and the environment has its address and credentials."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with mock.patch.dict(os.environ, environment(f"http://{host}:{port}")):
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    server.stop()


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testkey",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
