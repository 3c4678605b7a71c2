from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.format.key_limits import KeyLimits, check_keys, impossible_key
from sidecar.core.format.manifest import MAX_KEY_BYTES
from sidecar.store_url import MAX_PREFIX_BYTES
from tests import strategies
from trainer_hook.contract import META_RESTORED, ContractError, Node

LONGEST_NAME = "checkpoint-" + "9" * 18
LONGEST_ID = "a" * 128

long_paths = st.lists(st.sampled_from(["n" * 200, "ä" * 120, "s"]), min_size=1, max_size=5).map("/".join)


@given(strategies.names, strategies.ids, strategies.nodes(), st.lists(long_paths | strategies.paths), st.integers(0, 801))
def test_a_file_passes_only_if_each_key_that_it_may_get_fits(
    name: str, attempt: str, node: Node, paths: list[str], prefix_bytes: int
) -> None:
    possible = [keys.shared_file(name, path) for path in paths]
    if node.count > 1:  # another node may use the same path for other content
        possible += [keys.node_file(name, attempt, node, path) for path in paths]
    fits = all(prefix_bytes + len(key.encode()) <= MAX_KEY_BYTES for key in possible)
    assert (impossible_key(name, attempt, node, paths, KeyLimits(prefix_bytes)) is None) is fits


def of(path: str, **meta: str) -> Finished:
    return Finished("checkpoint-1", "v", 1, None, "a", Node(), 1.8e9, None, (FoundFile(path, 1, 1, 1),), dict(meta))


def test_the_file_the_length_and_the_limit_are_named() -> None:
    path = "n" * 200 + "/" + "m" * 200
    with pytest.raises(ContractError) as rejected:
        check_keys(of(path), KeyLimits(prefix_bytes=700))
    assert str(rejected.value) == (
        f"{path[:60]!r}… gets a key of 1114 bytes with the 700 of the prefix in CKPT_STORE, keys have 1024 at most: "
        "shorten its path or the prefix"
    )
    assert impossible_key("final", "a", Node(), ["n" * 1024], KeyLimits()) == (
        f"{'n' * 60!r}… gets a key of 1030 bytes, keys have 1024 at most: shorten its path"
    )
    check_keys(of(path), KeyLimits(prefix_bytes=610))
    check_keys(of(path, **{META_RESTORED: "0" * 16}), KeyLimits(prefix_bytes=700))


def test_a_file_system_takes_255_bytes_between_two_slashes_and_s3_any() -> None:
    check_keys(of("ä" * 127), KeyLimits(is_file_system=True))
    check_keys(of("ä" * 128), KeyLimits())
    with pytest.raises(ContractError, match=r"has a name of 256 bytes, file systems take 255: shorten it"):
        check_keys(of("d/" + "ä" * 128), KeyLimits(is_file_system=True))


def test_the_longest_prefix_leaves_room_for_every_document() -> None:
    node = Node(99_998, 99_999)
    documents = [
        keys.manifest(LONGEST_NAME, LONGEST_ID, node),
        keys.bundle(LONGEST_NAME, LONGEST_ID, 999, 99_999),
        keys.all_manifests(LONGEST_NAME, LONGEST_ID),
        keys.reupload_request(LONGEST_NAME, LONGEST_ID),
        keys.quarantined(LONGEST_NAME, "0" * 16),
        keys.arrival("0" * 16),
    ]
    assert max(len(f"{'p' * MAX_PREFIX_BYTES}/{key}") for key in documents) <= MAX_KEY_BYTES
