"""The last line of a command: what failed, and nothing that only a daemon can promise."""

from __future__ import annotations

import errno
import json

import pytest
from botocore.exceptions import BotoCoreError, ConnectTimeoutError

from sidecar.cli.output import fail
from sidecar.cli.progress import Note
from sidecar.errors import StoreUnavailable
from sidecar.store.file import errors as file_errors
from sidecar.store.s3 import errors as s3_errors

URL = "s3://bucket/run"


def unreachable() -> list[str]:
    """Errors as the stores make them, for what a daemon tries again."""
    found = []
    for translated, error in (
        (s3_errors.translated, BotoCoreError()),
        (s3_errors.translated, ConnectTimeoutError(endpoint_url="http://127.0.0.1:1")),
        (file_errors.writing, OSError(errno.ESTALE, "Stale file handle")),
        (file_errors.writing, OSError(errno.EIO, "Input/output error")),
    ):
        try:
            with translated(URL):
                raise error
        except StoreUnavailable as raised:
            found.append(str(raised))
    return found


@pytest.mark.parametrize("error", unreachable())
def test_the_error_that_ends_a_command_promises_no_other_try(error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tried again" in error
    assert fail(f" ls: {error}", 6, as_json=True) == 6
    printed = capsys.readouterr()
    assert "tried again" not in printed.err + printed.out
    assert json.loads(printed.out)["error"] in printed.err


@pytest.mark.parametrize("error", unreachable())
def test_an_error_before_another_try_says_once_that_there_is_one(error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Note("ls")("store_degraded", error=error)
    assert capsys.readouterr().err.count("tried again") == 1
