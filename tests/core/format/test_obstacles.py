"""What keeps a step from being stored on a volume."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.obstacles import (
    RETRY_S,
    contradiction,
    hint,
    is_of_one_step,
    may_pass,
    retry_in_s,
    same_but_for_case,
    unstorable,
)

paths = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join), max_size=6)


@given(paths)
def test_a_contradiction_is_a_path_that_is_also_a_directory(paths: list[str]) -> None:
    is_one = any(other.startswith(f"{path}/") for path in paths for other in paths)
    assert (contradiction(paths) is not None) == is_one


def test_a_contradiction_names_both() -> None:
    assert contradiction(["x/a/b", "x/a", "x/aa"]) == "'x/a' is a file and the directory of 'x/a/b'"


def test_names_are_measured_in_bytes() -> None:
    assert unstorable(["a" * 255, "b/" + "c" * 255]) is None
    assert "256 bytes" in (unstorable(["x/" + "ä" * 128 + "/y"]) or "")


def test_paths_that_differ_in_case_alone_are_found() -> None:
    assert same_but_for_case(["A/x", "a/x", "a/y", "b"]) == ["A/x", "a/x"]


def test_paths_that_differ_in_their_unicode_form_alone_are_found() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert same_but_for_case([composed, "cafe", decomposed]) == [composed, decomposed]
    assert same_but_for_case([composed.upper(), decomposed]) == [composed.upper(), decomposed]
    assert same_but_for_case(["\u212bngstrom", "\u00e5ngstrom"]) == ["\u212bngstrom", "\u00e5ngstrom"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, None])
def test_trouble_of_the_volume_concerns_every_step(number: int | None) -> None:
    assert not is_of_one_step(number)
    assert len(hint(number)) > 20


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space on the volume or make it larger, then ask again"),
        (errno.EDQUOT, "the quota of the volume is used up: raise it or free space, then ask again"),
        (errno.EROFS, "the volume is mounted read-only: mount it writable; after an error of its disk, replace it"),
        (errno.EACCES, "this user may not write there: run both containers as one user or group, or set fsGroup"),
        (errno.EPERM, "this user may not write there: run both containers as one user or group, or set fsGroup"),
        (errno.EIO, "the volume's disk fails: look at the node's kernel log, and replace the volume"),
        (errno.ESTALE, "the volume's mount is stale: mount it again, or start the pod anew"),
        (errno.EMFILE, "too many open files: raise the limit of the sidecar's container"),
        (errno.ENFILE, "too many open files on the machine: look at what else runs there"),
        (errno.ENODEV, "look at the volume and its mount, then ask again"),
        (None, "look at the volume and its mount, then ask again"),
    ],
)
def test_trouble_of_the_volume_has_its_remedy(number: int | None, remedy: str) -> None:
    assert hint(number) == remedy


def test_only_a_full_volume_is_told_to_be_freed() -> None:
    assert {n for n in errno.errorcode if "free space" in hint(n)} == {errno.ENOSPC, errno.EDQUOT}


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EILSEQ])
def test_trouble_with_names_concerns_one_step(number: int) -> None:
    assert is_of_one_step(number)


@given(st.one_of(st.none(), st.sampled_from(sorted(errno.errorcode))), st.integers(1, 10))
def test_an_error_that_may_pass_is_tried_again_a_few_times_and_one_that_a_person_ends_is_not(
    number: int | None, failed: int
) -> None:
    wait_s = retry_in_s(number, failed)
    assert (wait_s is not None) == (may_pass(number) and failed <= len(RETRY_S))
    assert wait_s is None or (wait_s > 0 and not is_of_one_step(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOTDIR, None])
def test_what_a_person_must_change_does_not_pass(number: int | None) -> None:
    assert not may_pass(number)
