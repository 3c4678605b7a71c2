"""First writes: which bodies the store is to take only if their key has no object yet (``If-None-Match: *``).

All attempts share the keys of a step. A request of a replaced pod can reach the store after a later pod has committed the step;
the condition lets the store refuse it. A refusal proves only that the key is taken: by an earlier try of the same request, by a
left-over, or by another writer. The file is then sent again without the condition, if the checkpoint may still be written.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from sidecar.core.format import keys
from sidecar.core.format.manifest import Manifest


def is_first_write(key: str, name: str, *, conditional: bool, taken: Container[str], shared: Container[str]) -> bool:
    """Whether the store is to refuse a body if its key has an object.

    Args:
        key: Key of the body.
        name: The checkpoint.
        conditional: The store refuses such bodies (``Capabilities.conditional_files``).
        taken: Keys that are known to have an object: with the condition, their bodies would be sent twice.
        shared: Paths that several nodes write, in each checkpoint.
    """
    return conditional and key not in taken and path_of(key, name) not in shared


def path_of(key: str, name: str) -> str:
    """Return a key of a checkpoint without the folder of that checkpoint."""
    return key.removeprefix(keys.folder(name))


def shows_another_writer(*, tries: int) -> bool:
    """Whether a refusal is a reason to read the commit and the lease again, and to list the checkpoint.

    ``tries``: number of times that this process has sent the body, with the refused one. After an earlier try that failed, the
    object is most likely its own; the guard was passed after that failure.
    """
    return tries == 1


def taken_keys(name: str, earlier: Iterable[Manifest], *, damaged: Collection[str]) -> frozenset[str]:
    """Return the keys of a checkpoint that have an object, by the documents of its earlier versions.

    Args:
        name: The checkpoint.
        earlier: Manifests of earlier versions, committed or not.
        damaged: Paths of files that a commit requires again: their object is another one, or missing.
    """
    named = {entry.key for manifest in earlier for entry in manifest.files}
    return frozenset(named | {keys.shared_file(name, path) for path in damaged})
