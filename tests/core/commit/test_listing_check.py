"""Manifests beside the listing of the store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.commit import ListingCheck, Object, manifest_of, waiting_for
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry, Manifest, NodeOf
from tests.core.commit.test_commit import ATTEMPT, NAME, attempts, entries, entry, manifest
from trainer_hook.contract import Node, rfc3339


@given(attempts())
def test_a_check_against_a_listing_finds_what_no_manifest_proves(case: tuple[list[Manifest], dict[str, Object], int]) -> None:
    manifests, listing, _ = case
    check = ListingCheck(listing)
    for one in manifests:
        check.add(one)
    files = [file for one in manifests for file in one.files]

    def is_proven(file: FileEntry) -> bool:
        there = listing.get(file.key)
        return there is not None and there.size_bytes == file.size_bytes and file.etag in (there.etag, "")

    unproven = {file.key for file in files} - {file.key for file in files if is_proven(file)}
    assert sorted(file.key for file in check.unproven()) == sorted(unproven)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True))
def test_a_wait_names_at_most_eight_nodes(missing: list[int]) -> None:
    reason = waiting_for(missing, count=100).reason
    assert reason.count(",") == min(len(missing), 8) - 1
    assert ("…" in reason) == (len(missing) > 8)
    assert str(missing[0]) in reason


def test_a_key_that_one_of_two_manifests_proves_is_proven() -> None:
    of = [manifest(Node(index, 2), [entry("config.json", b"one", etag=etag)]) for index, etag in enumerate(("e", "f"))]
    key = of[0].files[0].key
    for etag, unproven in (("e", []), ("f", []), ("else", [key])):
        check = ListingCheck({key: Object(3, etag)})
        for one in of:
            check.add(one)
        assert [file.key for file in check.unproven()] == unproven


@given(st.lists(entries, max_size=3, unique_by=lambda e: e.path))
def test_a_manifest_has_the_files_in_order_and_the_fields_of_the_checkpoint(files: list[FileEntry]) -> None:
    checkpoint = Finished(NAME, "v", 20, "jit", ATTEMPT, Node(1, 3), 1.8e9, 8, (), {"owner": "script"}, save_id="s")
    made = manifest_of(checkpoint, files)
    assert [file.path for file in made.files] == sorted(file.path for file in files)
    assert (made.name, made.step, made.attempt, made.save_id, made.reason) == (NAME, 20, ATTEMPT, "s", "jit")
    assert (made.node, made.world_size, made.meta) == (NodeOf(index=1, count=3), 8, {"owner": "script"})
    assert made.created_at == rfc3339(1.8e9)
