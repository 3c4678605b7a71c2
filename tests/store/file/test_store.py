"""What only a folder does."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import AccessRefused, ImpossibleKey, NotFound, StoreError, StoreFull, StoreUnavailable, TooLarge
from sidecar.store.file.store import FileStore
from sidecar.store.file.uploads import UPLOADS
from sidecar.store.protocol import Verification
from tests.mounts import mounted, small_volume
from tests.store.conftest import Source


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pvc" / "run-1"


@pytest.fixture
def folder(root: Path) -> FileStore:
    store = FileStore(root)
    store.probe()
    return store


@pytest.fixture
def plain(tmp_path: Path) -> Source:
    return Source(tmp_path, Verification.FSYNC)


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", "a/", f"{UPLOADS}/x", "a\0b"])
def test_a_key_cannot_leave_the_root(folder: FileStore, root: Path, key: str) -> None:
    for call in (lambda: folder.put(key, b""), lambda: folder.get(key), lambda: folder.delete([key]), lambda: folder.stat(key)):
        with pytest.raises(StoreError):
            call()
    assert names(root.parent) == ["run-1"]


def test_a_file_that_the_file_system_takes_at_no_time_is_too_large(folder: FileStore) -> None:
    """It was sent again for ever: the limit of FAT is 4 GiB, of ext4 16 TiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(TooLarge, match=r"takes no file of that size\): save it in several files"):
            folder.put("model", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_name_that_the_file_system_takes_at_no_time_is_refused_for_good(folder: FileStore) -> None:
    with pytest.raises(ImpossibleKey, match=r"takes no object of this name \(File name too long"):
        folder.put("n" * 256, b"")


def test_a_link_is_not_followed_out_of_the_root(folder: FileStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    (root / "checkpoint-1").symlink_to(outside)
    (root / "secret").symlink_to(outside / "secret")
    with pytest.raises(AccessRefused, match="symbolic link"):
        folder.put("checkpoint-1/x", b"")
    with pytest.raises(AccessRefused, match="symbolic link"):
        folder.get("checkpoint-1/secret")
    with pytest.raises(AccessRefused):
        folder.get("secret")
    assert list(folder.list("")) == []
    assert list(folder.list_folders()) == []
    assert names(outside) == ["secret"]


def test_replacing_a_link_leaves_its_target_alone(folder: FileStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("theirs")
    (root / "k").symlink_to(tmp_path / "target")
    folder.put("k", b"ours")
    assert folder.get("k") == b"ours"
    assert (tmp_path / "target").read_text() == "theirs"


def test_unfinished_writes_are_invisible(folder: FileStore, root: Path, plain: Source) -> None:
    upload_id = folder.begin_upload("checkpoint-1/x")
    plain.part(folder, "checkpoint-1/x", upload_id, 1, b"part")
    (root / UPLOADS / "tmp-left-by-a-crash").write_bytes(b"half")
    assert list(folder.list("")) == []
    assert list(folder.list_folders()) == []


@pytest.mark.parametrize("another", [False, True], ids=["same process", "another process"])
def test_a_part_that_is_sent_again_replaces_its_file(folder: FileStore, root: Path, plain: Source, another: bool) -> None:
    upload_id = folder.begin_upload("k")
    plain.part(folder, "k", upload_id, 2, b"old")
    store = FileStore(root) if another else folder
    new = plain.part(store, "k", upload_id, 2, b"new")
    assert names(root / UPLOADS / upload_id) == ["key", f"part-00002-{new.etag}"]


def test_what_a_crash_left_is_removed_after_a_day(folder: FileStore, root: Path) -> None:
    old, young = root / UPLOADS / "tmp-old", root / UPLOADS / "tmp-young"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (time.time() - 90_000,) * 2)
    folder.probe()
    assert not old.exists()
    assert young.exists()


def test_an_upload_whose_parts_cannot_all_be_deleted_stays_listed(
    folder: FileStore, root: Path, plain: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed in the deletion had removed the key: nothing ever found the parts again."""
    upload_id, unlink = folder.begin_upload("checkpoint-1/x"), os.unlink
    for number in (1, 2, 3):
        plain.part(folder, "checkpoint-1/x", upload_id, number, b"part")

    def fail(path: str | Path, *, dir_fd: int | None = None) -> None:
        if Path(path).name.startswith("part-00002"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", fail)
    folder.abort_upload("checkpoint-1/x", upload_id)
    assert [pending.key for pending in folder.pending_uploads("")] == ["checkpoint-1/x"]
    monkeypatch.setattr(os, "unlink", unlink)
    folder.abort_upload("checkpoint-1/x", upload_id)
    assert names(root / UPLOADS) == []


def test_an_upload_that_has_lost_its_key_is_removed_after_a_day(folder: FileStore, root: Path, plain: Source) -> None:
    old, young = (root / UPLOADS / folder.begin_upload("checkpoint-1/x") for _ in range(2))
    for upload in (old, young):
        plain.part(folder, "checkpoint-1/x", upload.name, 1, b"part")
        (upload / "key").unlink()
    os.utime(old, (time.time() - 90_000,) * 2)
    folder.probe()
    assert names(root / UPLOADS) == [young.name]


@pytest.mark.slow
def test_an_upload_that_a_full_volume_does_not_take_leaves_no_folder(tmp_path: Path) -> None:
    with small_volume(tmp_path / "small", "64k") as small:
        store = FileStore(small / "run")
        store.probe()
        with suppress(OSError), (small / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        with pytest.raises(StoreFull):
            store.begin_upload("checkpoint-1/x")
        assert names(small / "run" / UPLOADS) == []


def test_empty_folders_leave_with_their_last_object(folder: FileStore, root: Path) -> None:
    folder.put("checkpoint-1/a/b", b"")
    folder.put("checkpoint-1/c", b"")
    folder.delete(["checkpoint-1/a/b"])
    assert names(root / "checkpoint-1") == ["c"]
    folder.delete(["checkpoint-1/c"])
    assert names(root) == [UPLOADS]


def test_writing_beside_a_deletion_of_the_same_folder_never_fails(root: Path, folder: FileStore) -> None:
    over = threading.Event()

    def delete() -> None:
        other = FileStore(root)
        while not over.is_set():
            other.delete(["checkpoint-1/a/x"])

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(300):
            folder.put("checkpoint-1/a/x", b"")
    finally:
        over.set()
        thread.join()


def test_a_folder_that_another_process_made_and_removed_is_not_in_the_way(
    folder: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, lost = os.mkdir, iter([True])

    def mkdir(path: Path, *arguments: int) -> None:
        if Path(path).name == "checkpoint-1" and next(lost, False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    folder.put("checkpoint-1/x", b"there")
    assert next(lost, None) is None
    assert folder.get("checkpoint-1/x") == b"there"


def test_an_object_where_a_folder_is_says_so(folder: FileStore) -> None:
    folder.put("a/b", b"")
    with pytest.raises(AccessRefused, match="remove one of them"):
        folder.put("a", b"")
    with pytest.raises(AccessRefused, match="remove one of them"):
        folder.put("a/b/c", b"")
    with pytest.raises(NotFound):
        folder.get("a")
    with pytest.raises(NotFound):
        folder.get("a/b/c")
    folder.delete(["a", "a/b/c"])
    assert folder.get("a/b") == b""


def test_a_volume_that_is_not_mounted_is_not_an_empty_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "never-mounted")
    for call in (lambda: list(store.list("")), lambda: list(store.list_folders())):
        with pytest.raises(StoreUnavailable, match="mounted"):
            call()


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, StoreFull, "free space or inodes"),
        (errno.EDQUOT, StoreFull, "quota"),
        (errno.EROFS, AccessRefused, "writable"),
        (errno.EACCES, AccessRefused, "fsGroup"),
        (errno.ESTALE, StoreUnavailable, "tried again"),
        (errno.EIO, StoreUnavailable, "tried again"),
    ],
)
def test_what_the_kernel_refuses_names_the_object_and_the_next_step(
    folder: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError], said: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(kind, match=f"checkpoint-1/x: .*{said}"):
            folder.put("checkpoint-1/x", b"content")
    assert list(folder.list("")) == []
    assert names(root / UPLOADS) == []


def test_a_write_that_fails_again_is_told_with_the_same_words(
    folder: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try named another temporary file: the log could not be grouped by its lines."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    errors = []
    for _ in range(2):
        with pytest.raises(AccessRefused) as error:
            folder.put("checkpoint-1/x", b"content")
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert f"({root / UPLOADS})" in errors[0]


@pytest.mark.slow
def test_a_full_volume_is_named_and_nothing_half_is_left(tmp_path: Path, plain: Source) -> None:
    with small_volume(tmp_path / "small", "2m") as small:
        store = FileStore(small / "run")
        store.probe()
        with pytest.raises(StoreFull, match="free space"):
            plain.put(store, "checkpoint-1/x", b"x" * (3 << 20))
        assert list(store.list("")) == []
        plain.put(store, "checkpoint-1/x", b"x" * (1 << 20))


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.put("checkpoint-1/a/x", b"")
    real: Callable[..., object] = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("/a"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreUnavailable):
        list(folder.list("checkpoint-1/"))


def test_without_hard_links_conditional_writes_are_best_effort_and_the_probe_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    store = FileStore(root)
    assert not store.probe().conditional_put
    store.put("k", b"first", only_if_absent=True)
    with pytest.raises(StoreError):
        store.put("k", b"second", only_if_absent=True)
    assert store.get("k") == b"first"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.EIO, 0])
def test_parts_are_joined_where_the_kernel_cannot_share_them(
    folder: FileStore, plain: Source, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        if not number:  # some kernels: no error, and no byte
            return 0
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    upload_id = folder.begin_upload("k")
    parts = [plain.part(folder, "k", upload_id, n, bytes([n]) * 70_000) for n in (1, 2)]
    whole = b"\x01" * 70_000 + b"\x02" * 70_000
    folder.complete_upload("k", upload_id, parts, crc64nvme=checksum(whole))
    assert folder.get("k") == whole


def test_a_replacement_of_equal_size_has_another_etag(folder: FileStore) -> None:
    etags = {folder.put("k", b"same size").etag for _ in range(50)}
    assert len(etags) == 50


def test_read_back_can_be_asked_for(root: Path) -> None:
    assert FileStore(root, verification=Verification.READ_BACK).probe().verification is Verification.READ_BACK


@pytest.mark.parametrize("below", ["", "runs/llama"])
def test_an_unmounted_store_does_not_continue_below_the_empty_mount_point(tmp_path: Path, below: str) -> None:
    place = tmp_path / "mnt"
    with small_volume(tmp_path / "disk", "2m") as disk:
        with mounted(place, "--bind", str(disk)):
            store = FileStore(place / below)
            store.probe()
            store.put("run.json", b"{}")
        for call in (
            lambda: store.put("checkpoint-1/.complete", b"{}"),
            lambda: store.begin_upload("checkpoint-1/model"),
            lambda: store.get("run.json"),
            lambda: store.stat("run.json"),
            lambda: store.list(""),
        ):
            with pytest.raises(StoreUnavailable, match="is its volume mounted"):
                call()
        assert not list(place.iterdir())
        with mounted(place, "--bind", str(disk)):
            store.put("checkpoint-1/.complete", b"{}")
            assert store.get("run.json") == b"{}"


def test_a_store_whose_content_was_deleted_goes_on(folder: FileStore, root: Path) -> None:
    folder.put("run.json", b"{}")
    shutil.rmtree(root)
    root.mkdir()
    with pytest.raises(NotFound):
        folder.get("run.json")
    folder.put("checkpoint-1/.complete", b"{}")
