"""Longest keys that a store takes. It refuses a longer one at each try, so the checkpoint is rejected at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import MAX_KEY_BYTES
from sidecar.core.format.obstacles import unstorable
from trainer_hook.contract import ContractError, Node


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a store takes as a key, beside ``MAX_KEY_BYTES``, which the format has for every store."""

    prefix_bytes: int = 0
    """Bytes that the store puts before each key, UTF-8: the prefix of ``CKPT_STORE`` with its slash."""
    is_file_system: bool = False
    """Each part between two slashes is the name of a file or directory."""


def check_keys(checkpoint: Finished, limits: KeyLimits) -> None:
    """Check the keys that a checkpoint's files may get; one that was downloaded is never written again, and passes.

    Raises:
        ContractError: The text names the file, the length of its key and the limit.
    """
    if checkpoint.restored_from is not None:
        return
    paths = [file.path for file in checkpoint.files]
    if (why := impossible_key(checkpoint.name, checkpoint.attempt, checkpoint.node, paths, limits)) is not None:
        raise ContractError(why)


def impossible_key(name: str, attempt: str, node: Node, paths: Iterable[str], limits: KeyLimits) -> str | None:
    """Return why a store never takes one of these files, or ``None``.

    Of several nodes, one may have to use the longer key of its own folder (I6).
    """
    known = list(paths)
    if limits.is_file_system and (why := unstorable(known)) is not None:
        return f"{why}: shorten it"
    for path in known:
        key = keys.shared_file(name, path) if node.count == 1 else keys.node_file(name, attempt, node, path)
        if (size := limits.prefix_bytes + len(key.encode())) > MAX_KEY_BYTES:
            with_prefix = f" with the {limits.prefix_bytes} of the prefix in CKPT_STORE" if limits.prefix_bytes else ""
            shorter = "its path or the prefix" if limits.prefix_bytes else "its path"
            said = f"{path[:60]!r}… gets a key of {size} bytes{with_prefix}"
            return f"{said}, keys have {MAX_KEY_BYTES} at most: shorten {shorter}"
    return None
