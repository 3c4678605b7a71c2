"""The one way to the volume: what it does, and what it refuses, with openat2(2) and step by step."""

from __future__ import annotations

import ast
import errno
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.volume import opener, resolve
from sidecar.volume.bulk import link_files, statuses
from sidecar.volume.opener import Folder, NotRegular, Place

SIDECAR = Path(opener.__file__).parents[1]


@pytest.fixture(params=["openat2", "step by step"], autouse=True)
def resolver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "step by step":
        monkeypatch.setattr(resolve, "resolver", lambda: resolve.open_stepwise)
    elif resolve.resolver() is resolve.open_stepwise:
        pytest.skip("this kernel has no openat2")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What nobody may reach from the volume: stands for a mounted secret."""
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    for path in ("secret", ".complete", "deep/secret"):
        (folder / path).write_bytes(b"secret")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    (tmp_path / "volume").mkdir()
    return Folder(tmp_path / "volume")


def untouched(outside: Path) -> bool:
    return sorted(p.relative_to(outside).as_posix() for p in outside.rglob("*")) == [
        ".complete",
        "deep",
        "deep/secret",
        "secret",
    ] and all(p.read_bytes() == b"secret" for p in outside.rglob("*") if p.is_file())


def test_others_may_read_what_is_written_whatever_the_umask(root: Folder) -> None:
    before = os.umask(0o077)
    try:
        (root / "token").publish(b"", mode=0o640)
        os.close((root / "model").create(0o664))
    finally:
        os.umask(before)
    assert [stat.S_IMODE((root / name).status().st_mode) for name in ("token", "model")] == [0o640, 0o664]


def test_whole_files_and_trees(root: Folder) -> None:
    place = root / "a/b/model"
    place.parent.make_folder()
    place.publish(b"weights", mode=0o640)
    assert place.read(max_bytes=100)[0] == b"weights"
    assert stat.S_IMODE(place.status().st_mode) == 0o640
    place.rename(root / "a/other")
    assert sorted(path for path, _ in (root / "").walk()) == ["a", "a/b", "a/other"]
    assert [name for name, is_folder in (root / "a").entries() if is_folder] == ["b"]
    link_files(root / "a", root / "pin", ["other"])
    assert dict(statuses(root / "pin", ["other"]))["other"].st_nlink == 2
    (root / "a").discard()
    assert (root / "").entries() == [("pin", True)]
    with pytest.raises(ValueError, match="leads out"):
        root / "../outside"


def test_a_tree_deeper_than_any_path_goes_whole(root: Folder) -> None:
    above = os.open(root.path, os.O_RDONLY)
    for _ in range(1200):  # 4 bytes each: more than PATH_MAX together
        os.mkdir("deep", dir_fd=above)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=above))
        below = os.open("deep", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    (root / "deep").discard()
    assert (root / "").entries() == [("file", False)]


Attempt = Callable[[Place], object]
ATTEMPTS: dict[str, Attempt] = {
    "read": lambda place: (place / "secret").read(max_bytes=10),
    "open to write": lambda place: os.close((place / "secret").open_file(os.O_RDWR)),
    "create": lambda place: os.close((place / "new").create()),
    "publish": lambda place: (place / "secret").publish(b"x"),
    "remove": lambda place: (place / "secret").remove(),
    "discard": lambda place: (place / "secret").discard(),
    "discard a tree": lambda place: (place / "deep").discard(),
    "rename from": lambda place: (place / "secret").rename(place.with_name("stolen")),
    "rename into": lambda place: place.with_name("own").rename(place / "secret"),
    "make a folder": lambda place: (place / "new/er").make_folder(),
    "make it one's own": lambda place: (place / "deep").own_folder(0o777),
    "change its mode": lambda place: place.change_mode(0o777),
    "link from": lambda place: link_files(place, place.with_name("pin"), ["secret"]),
    "link into": lambda place: link_files(place.folder / "mine", place, ["model"]),
    "status": lambda place: (place / "secret").status(),
    "list": lambda place: place.entries(),
    "walk": lambda place: list(place.walk()),
    "make a link": lambda place: (place / "new").make_link("x"),
}


@pytest.mark.parametrize("inside", ["link", "real/link"])
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_is_done_through_a_link(attempt: str, inside: str, root: Folder, outside: Path) -> None:
    (root.path / "real").mkdir()
    (root.path / "mine").mkdir()
    (root.path / "mine/model").write_bytes(b"x")
    (root.path / Path(inside).parent / "own").write_bytes(b"x")
    (root.path / inside).symlink_to(outside)
    mode = outside.stat().st_mode
    if attempt.startswith("discard"):
        ATTEMPTS[attempt](root / inside)
    else:
        with pytest.raises(OSError, match=f"{root.path}/{inside}") as raised:
            ATTEMPTS[attempt](root / inside)
        assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert untouched(outside)
    assert outside.stat().st_mode == mode
    assert not any("secret" in names for _, _, names in os.walk(root.path))


def test_what_has_a_links_name_replaces_or_removes_the_link_itself(root: Folder, outside: Path) -> None:
    for name in ("publish", "create", "discard", "remove", "own"):
        (root.path / name).symlink_to(outside / "secret" if name in ("publish", "create") else outside)
    (root / "publish").publish(b"x")
    os.close((root / "create").create())
    (root / "discard").discard()
    (root / "remove").remove()
    assert (root / "own").own_folder(0o755)
    assert untouched(outside)
    assert dict((root / "").entries()) == {"publish": False, "create": False, "own": True}


def test_what_is_no_regular_file_is_refused_at_once(root: Folder) -> None:
    os.mkfifo(root.path / "fifo")
    (root.path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{root.fd}/socket")
    for name in ("fifo", "folder", "socket"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR):
            with pytest.raises(NotRegular):
                (root / name).open_file(flags)
    assert sorted(stat.S_IFMT(status.st_mode) for _, status in (root / "").walk()) == sorted(
        [stat.S_IFIFO, stat.S_IFDIR, stat.S_IFSOCK]
    )


@pytest.fixture
def mounted(root: Folder, outside: Path) -> Iterator[Place]:
    (root.path / "mount").mkdir()
    if subprocess.run(["mount", "--bind", outside, root.path / "mount"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield root / "mount"
    subprocess.run(["umount", root.path / "mount"], check=True)


def test_no_mount_is_crossed(mounted: Place, root: Folder, outside: Path) -> None:
    with pytest.raises(OSError, match="cross-device"):
        (mounted / "secret").read(max_bytes=10)
    mounted.discard()
    assert [path for path, _ in (root / "").walk(lenient=True)] == ["mount"]
    assert untouched(outside)


def test_a_held_directory_stays_the_one_that_it_was(root: Folder, outside: Path) -> None:
    (root.path / "checkpoint-1").mkdir()
    (root.path / "checkpoint-1/model").write_bytes(b"weights")
    with (root / "checkpoint-1").held() as held:
        (root.path / "checkpoint-1").rename(root.path / "moved")
        (root.path / "checkpoint-1").symlink_to(outside)
        assert (held / "model").read(max_bytes=10)[0] == b"weights"
        assert [path for path, _ in (held / "").walk()] == ["model"]


# Nobody goes around it.

_OF_OS = frozenset(
    {"open", "link", "symlink", "rename", "renames", "replace", "unlink", "remove", "rmdir", "removedirs", "mkdir", "makedirs"}
    | {"mknod", "mkfifo", "stat", "lstat", "chmod", "lchmod", "chown", "utime", "scandir", "listdir", "walk", "fwalk", "access"}
    | {"statvfs", "readlink", "truncate"}
)
_OF_PATHS = frozenset(
    {"read_bytes", "read_text", "write_bytes", "write_text", "unlink", "rmdir", "mkdir", "touch", "glob", "rglob", "iterdir"}
    | {"exists", "is_dir", "is_file", "is_symlink", "lstat", "lchmod", "chmod", "symlink_to", "hardlink_to", "readlink"}
)
_ELSEWHERE = {"store", "kubernetes", "kubectl"}
"""What works on a store's folder, on manifests, on mounted secrets, and on a person's own machine."""
_MAY = {
    "volume/bulk.py": None,
    "volume/descriptors.py": None,
    "volume/opener.py": None,
    "volume/resolve.py": None,
    "volume/inotify.py": {"read"},
    "volume/examination.py": {"read_text"},  # of /proc/sys
    "volume/sockets.py": {"chmod"},  # by /proc/self/fd
    "volume/volume.py": {"mkdir"},  # of the mount itself
    "volume/hook_install.py": {"read_bytes", "rglob", "mkdir", "is_file"},  # of the package and the operator's folder
    "api/page.py": {"read_bytes"},  # of the package
    "cli/options.py": {"exists", "glob", "is_file"},  # of the folder of a store that a person named
    "cli/streams.py": {"open"},  # of /dev/null
    "cli/store_copies.py": {"is_dir", "mkdir"},  # of folders that a person named
    "standalone/directory.py": {"is_dir", "iterdir"},  # of the folder that a person pushes
    "standalone/pulling.py": {"mkdir"},  # of the folder that a person named
    "volume/boot.py": {"read_text"},  # of /proc
    "cli/render.py": {"shutil"},  # the width of the terminal
    "cli/run.py": {"read_text"},  # of /proc/self/mountinfo
    "daemon/settings.py": None,
    "daemon/termination_message.py": {"is_file", "access", "write_text"},  # of /dev/termination-log
    "download/partial_file.py": {"open"},  # of /proc/self/mountinfo
}


def test_no_other_module_opens_lists_or_changes_anything_on_the_volume() -> None:
    found = []
    for path in sorted(SIDECAR.rglob("*.py")):
        name = path.relative_to(SIDECAR).as_posix()
        may = _MAY.get(name, set())
        if name.partition("/")[0] in _ELSEWHERE or may is None:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            used = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                used = "open"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                used = node.attr if node.attr in _OF_OS else None
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_PATHS:
                used = node.func.attr
            elif isinstance(node, ast.Import | ast.ImportFrom) and "shutil" in ast.dump(node):
                used = "shutil"
            if used is not None and used not in may:
                found.append(f"{name}:{node.lineno}: {used}")  # type: ignore[attr-defined]
    assert found == [], "go through sidecar.volume.opener"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_directory_whose_status_cannot_be_had_now_is_not_taken_for_a_file(
    number: int, root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume passed over the newest step, because "a link or file" stood where .ckpt was."""
    (root / "deep").make_folder()

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        (root / "deep").is_folder()
