"""Operations on many files of one directory, with one system call per file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from sidecar.volume.descriptors import opened
from sidecar.volume.opener import HELD, Place


def link_files(source: Place, target: Place, paths: Iterable[str]) -> None:
    """Hard-link files of one directory, at the same paths, into another one, which is created.

    One system call per file. The entry that has the name now is linked, even a symbolic link: verify it when it is opened.
    """
    target.make_folder()
    with source.held() as here, target.held() as there:
        for inside, names in _by_folder(paths):
            if inside:
                (there / inside).make_folder()
            with opened(here.open(inside, HELD)) as from_fd, opened(there.open(inside, HELD)) as to_fd:
                for name in names:
                    os.link(name, name, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)


def statuses(place: Place, paths: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and status of files below one directory, in any order, with one system call per file."""
    with place.held() as here:
        for inside, names in _by_folder(paths):
            with opened(here.open(inside, HELD)) as fd:
                for name in names:
                    yield f"{inside}/{name}" if inside else name, os.stat(name, dir_fd=fd, follow_symlinks=False)


def _by_folder(paths: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        above, _, name = path.rpartition("/")
        found.setdefault(above, []).append(name)
    return found.items()
