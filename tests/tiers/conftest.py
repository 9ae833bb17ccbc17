"""The S3 server of these tests: one for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.servers import S3Server, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as found:
        yield found
