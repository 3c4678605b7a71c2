"""A prefix of each kind of store, and the program as a person runs it there."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.main import main
from sidecar.daemon.settings import from_environment
from sidecar.store.opening import open_anywhere
from sidecar.store.protocol import Store
from tests import servers

BUCKET = "standalone"


class Person:
    """Runs commands, and keeps what they printed."""

    def __init__(self, url: str, endpoint: str | None, capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> None:
        self.url = url
        self.endpoint = endpoint
        self._capsys = capsys
        self._environ = environ
        self.err = ""

    def run(self, *arguments: str) -> int:
        code = main(arguments)
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: str, code: int = 0) -> Any:
        assert self.run(*arguments, "--json") == code, (self.out, self.err)
        return json.loads(self.out)

    def at(self, path: str) -> str:
        return f"{self.url}/{path}"

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """Open the store behind the program's back."""
        opened = open_anywhere(from_environment({**self._environ, "CKPT_STORE": self.url}))
        opened.probe()
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture
def person_of(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Person]:
    """Return what makes a person with a store of a kind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(kind: str) -> Person:
        endpoint = None if kind == "file" else request.getfixturevalue(f"{kind}_endpoint")
        for name in [name for name in os.environ if name.startswith("CKPT_TEST_")]:  # of the tests, not of the program
            monkeypatch.delenv(name)
        if endpoint is None:
            (tmp_path / "store").mkdir()
            return Person(f"file://{tmp_path}/store/run", None, capsys, {})
        with contextlib.suppress(Exception):  # it is there
            servers.create_bucket(endpoint, BUCKET)
        environ = {
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_S3_ENDPOINT": endpoint,
            "AWS_DEFAULT_REGION": servers.REGION,
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return Person(f"s3://{BUCKET}/{uuid.uuid4().hex}/run", endpoint, capsys, environ)

    return make


@pytest.fixture(params=["file", "moto", *servers.REAL_STORES])
def person(request: pytest.FixtureRequest, person_of: Callable[[str], Person]) -> Person:
    return person_of(request.param)


@pytest.fixture
def local(person_of: Callable[[str], Person]) -> Person:
    """With a folder as the store: for what does not depend on its kind."""
    return person_of("file")


def checkpoint(folder: Path, step: int, files: dict[str, bytes] | None = None) -> Path:
    """Make a checkpoint directory as the Hugging Face Trainer leaves it: without a marker."""
    path = folder / f"checkpoint-{step}"
    for name, content in (files or {"model.safetensors": b"m" * 1000 + b"%d" % step, "sub/optimizer.pt": b"o" * 10}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def old(path: Path) -> Path:
    """Set the times of a directory's files back: nobody writes to it."""
    past_s = time.time() - 60
    for file in (path, *path.rglob("*")):
        os.utime(file, (past_s, past_s))
    return path


@pytest.fixture
def pushed(tmp_path: Path) -> Any:
    """Pushes checkpoints of these steps to the prefix of a person."""

    def make(person: Person, *steps: int) -> Person:
        for step in steps:
            old(checkpoint(tmp_path / "out", step))
        assert person.run("push", str(tmp_path / "out"), person.url) == 0
        return person

    return make
