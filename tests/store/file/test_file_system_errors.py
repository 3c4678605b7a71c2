"""Every operation of a folder store, with every call to the file system failing once, as on a file server that went away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import NotFound, StoreError
from sidecar.store.file.store import FileStore
from sidecar.store.protocol import Part, Store
from sidecar.store.slice import FileSlice, OpenGate
from tests.store.conftest import read_all

CONTENT = b"content"
CALLS = ("stat", "lstat", "fstat", "open", "scandir", "listdir", "mkdir", "replace", "link", "fsync", "preadv", "write")
"""Calls of ``os``; those of ``pathlib`` go through them."""
MOST = 40
"""No operation makes more of them."""


@pytest.fixture
def folder(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "pvc" / "run-1")
    store.probe()
    store.put("checkpoint-1/k", CONTENT)
    return store


def body() -> FileSlice:
    fd = os.memfd_create("body")
    os.pwrite(fd, CONTENT, 0)
    return FileSlice(fd, 0, len(CONTENT), gate=OpenGate(), name="k")


def sent(send: Callable[[FileSlice], object]) -> object:
    content = body()
    try:
        return send(content)
    finally:
        os.close(content.fd)


def completed(store: Store) -> object:
    upload = store.begin_upload("checkpoint-1/u")
    part = sent(lambda b: store.upload_part("checkpoint-1/u", upload, 1, b))
    assert isinstance(part, Part)
    assert [(p.number, p.size_bytes) for p in store.list_parts("checkpoint-1/u", upload)] == [(1, len(CONTENT))]
    assert [p.key for p in store.pending_uploads("")] == ["checkpoint-1/u"]
    return store.complete_upload("checkpoint-1/u", upload, [part], crc64nvme=checksum(CONTENT))


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda s: s.get("checkpoint-1/k"),
    "put": lambda s: s.put("checkpoint-1/new/k", CONTENT),
    "put_if_absent": lambda s: s.put("checkpoint-1/new/k", CONTENT, only_if_absent=True),
    "stat": lambda s: s.stat("checkpoint-1/k").size_bytes,
    "list": lambda s: [stored.key for stored in s.list("")],
    "list_below": lambda s: [stored.key for stored in s.list("checkpoint-1/")],
    "list_folders": lambda s: list(s.list_folders()),
    "list_folders_below": lambda s: list(s.list_folders("checkpoint-1/")),
    "put_file": lambda s: sent(lambda b: s.put_file("checkpoint-1/new/k", b)),
    "copy": lambda s: s.copy("checkpoint-1/k", "checkpoint-2/k", etag=s.stat("checkpoint-1/k").etag),
    "read": lambda s: read_all(s, "checkpoint-1/k"),
    "upload": completed,
    "delete": lambda s: s.delete(["checkpoint-1/k"]),
}


class Failing:
    """Lets the n-th call of those patched fail, where it concerns the store."""

    def __init__(self, root: Path, number: int) -> None:
        self._root = str(root)
        self.countdown = -1
        self._number = number

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(place: Any, *arguments: Any, **options: Any) -> Any:
            path = str(Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else place)
            if path.startswith(self._root):
                self.countdown -= 1
                if self.countdown == 0:
                    raise OSError(self._number, os.strerror(self._number), *([] if isinstance(place, int) else [path]))
            return real(place, *arguments, **options)

        return call


@pytest.fixture
def failing(tmp_path: Path, folder: FileStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    made = Failing(tmp_path / "pvc", errno.ESTALE)
    with monkeypatch.context() as patch:
        made.patch(patch)
        yield made


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_of_the_file_system_is_one_of_the_store_and_never_an_absence(
    operation: str, folder: FileStore, failing: Failing
) -> None:
    act = OPERATIONS[operation]
    failed = 0
    for which in range(1, MOST + 1):
        failing.countdown = which
        try:
            act(folder)
        except NotFound as error:
            pytest.fail(f"call {which}: {error!r}")
        except StoreError:
            failed += 1
        is_over, failing.countdown = failing.countdown > 0, -1
        if is_over:
            break
        folder.put("checkpoint-1/k", CONTENT)
        folder.delete(["checkpoint-1/new/k", "checkpoint-2/k", "checkpoint-1/u"])
        for upload in list(folder.pending_uploads("")):
            folder.abort_upload(upload.key, upload.upload_id)
    else:
        pytest.fail(f"more than {MOST} calls")
    assert failed
