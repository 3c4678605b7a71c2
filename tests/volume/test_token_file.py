"""The token on the volume, and the calls that it lets pass."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from sidecar.volume.opener import Folder, Place
from sidecar.volume.token_file import TokenFile


class FullPlace(Place):
    """A file on a full volume."""

    def publish(self, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("header", "where_required", "where_not"),
    [
        (None, False, True),
        ("", False, True),
        ("Basic dXNlcjpwYXNz", False, True),
        ("Bearer none", False, False),
        ("Bearer {token}", True, True),
        ("{token}", False, True),
    ],
)
def test_a_wrong_token_is_accepted_nowhere_and_none_where_none_is_required(
    tmp_path: Path, header: str | None, where_required: bool, where_not: bool
) -> None:
    file = TokenFile(Place(Folder(tmp_path), "token"))
    file.publish()
    given = None if header is None else header.format(token=(tmp_path / "token").read_text())
    assert file.accepts(given, is_required=True) is where_required
    assert file.accepts(given, is_required=False) is where_not


def test_while_the_volume_is_too_full_for_the_token_an_old_one_lets_the_trainer_ask_for_space(tmp_path: Path) -> None:
    file = TokenFile(FullPlace(Folder(tmp_path), "token"))
    file.publish()
    assert file.is_late
    assert file.accepts("Bearer of-the-start-before", is_required=False)
    assert not file.accepts("Bearer of-the-start-before", is_required=True)


def test_a_token_that_was_deleted_with_its_folder_is_written_again_and_no_other_one_is(tmp_path: Path) -> None:
    (tmp_path / ".ckpt").mkdir()
    file = TokenFile(Place(Folder(tmp_path), ".ckpt/token"))
    file.publish()
    shutil.rmtree(tmp_path / ".ckpt")
    file.keep()
    assert file.accepts(f"Bearer {(tmp_path / '.ckpt/token').read_text()}", is_required=True)
    (tmp_path / ".ckpt/token").write_text("of a later sidecar")
    file.keep()
    assert (tmp_path / ".ckpt/token").read_text() == "of a later sidecar"
    shutil.rmtree(tmp_path)
    file.keep()
    assert not tmp_path.exists()
