"""Which files of a version have to be sent again."""

from __future__ import annotations

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.upload.commit.reuploads import Reuploads
from trainer_hook.contract import Node

CHECKPOINT = Finished("checkpoint-20", "v", 20, "periodic", "a", Node(0, 2), 1.8e9, None, (), {})
SHARED = {path: keys.shared_file("checkpoint-20", path) for path in ("a", "b")}


def test_damaged_files_are_known_until_a_manifest_was_published() -> None:
    """An upload that was interrupted adopted them from the earlier manifest."""
    reuploads = Reuploads()
    reuploads.ask(CHECKPOINT, {"a": SHARED["a"]})
    assert reuploads.damaged("v") == reuploads.damaged("v") == {"a"}
    reuploads.ask(CHECKPOINT, {"b": SHARED["b"]})
    assert reuploads.damaged("v") == {"a", "b"}
    reuploads.published("v")
    assert not reuploads.damaged("v")


def test_files_whose_key_another_node_owns_keep_their_own_key() -> None:
    reuploads = Reuploads()
    reuploads.ask(CHECKPOINT, {"a": "checkpoint-20/.ckpt/a/node-00000/a", "b": SHARED["b"]})
    reuploads.published("v")
    assert reuploads.moved("v") == {"a": "checkpoint-20/.ckpt/a/node-00000/a"}
    reuploads.forget("v")
    assert not reuploads.moved("v")
