"""Names and limits: paths on the shared volume, keys of ``meta``, valid paths and ids."""

from __future__ import annotations

import re
from typing import Final

FORMAT: Final = 1

MARKER = ".complete"
SYSTEM_DIR = ".ckpt"
FINAL = "final"

LEASES = f"{SYSTEM_DIR}/ranks"
TRAINER_STATE = f"{SYSTEM_DIR}/trainer.json"
TERMINATING = f"{SYSTEM_DIR}/terminating"
REQUEST = f"{SYSTEM_DIR}/request.json"
ANSWER = f"{SYSTEM_DIR}/answer.json"
PINS = f"{SYSTEM_DIR}/pins"
INCOMING = f"{SYSTEM_DIR}/incoming"
JOURNAL = f"{SYSTEM_DIR}/journal"
TOKEN = f"{SYSTEM_DIR}/token"
API_SOCKET = f"{SYSTEM_DIR}/api.sock"
EXIT_REPORT = f"{SYSTEM_DIR}/exit-report.json"
RUNS = f"{SYSTEM_DIR}/runs.json"
NODES = f"{SYSTEM_DIR}/nodes.json"
LOCK = f"{SYSTEM_DIR}/lock"
"""Held by the sidecar that uses the volume, with ``flock``."""

DEFAULT_DIR = "/checkpoints"
DEFAULT_API_PORT = 9470
PREEMPTED_EXIT_CODE = 143

MAX_MARKER_BYTES = 1 << 20
MAX_META_BYTES = 64 << 10
DOWNLOAD_META_BYTES = 128
"""Further bytes of ``meta`` in the marker of a downloaded checkpoint, for ``META_OF_DOWNLOAD`` and ``META_PARTIAL``."""
MAX_META_DEPTH = 64
"""Nesting of objects and arrays in ``meta``; JSON parsers fail somewhere above a hundred."""
MAX_NODES = 99_999
"""The names of manifests have five digits."""
MAX_PATH_BYTES = 900
"""Longest relative path of a file, UTF-8. S3 keys hold 1,024 bytes; the rest is left for prefix, attempt and node."""

REASONS = frozenset({"periodic", "jit", "manual", "final"})
TRAINER_STATES = frozenset({"running", "preempted", "succeeded", "failed"})
ACTIONS = frozenset({"save", "save-and-stop"})
OUTCOMES = frozenset({"saved", "failed"})
NOTICE_SOURCES = frozenset({"sigterm", "prestop", "spot", "api", "fenced"})

SCRIPT_OWNED = "script"
"""Value of ``meta["owner"]`` for a checkpoint that the training script itself rotates: the sidecar never deletes it."""

META_OWNER = "owner"
META_TRAIN_CALL = "train_call"
"""Key in ``meta``: index of the ``train()`` call that saved the checkpoint, from 0; absent: 0."""
META_RESTORED = "restored"
"""Key in ``meta`` of a local marker: CRC64NVME of the commit that was downloaded; such a directory is never uploaded again."""
META_RESTORED_BOOT = "restored_boot"
"""Key in ``meta`` beside it: the run of the kernel that downloaded it; its end may have cost data that was not on the disk."""
META_OF_DOWNLOAD = frozenset({META_RESTORED, META_RESTORED_BOOT})
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""File with the id of the present run of the kernel. Source: random(4)."""

META_RESUMED_FROM = "resumed_from"
"""Key in ``meta``: the checkpoint that the attempt resumed from, ``{"step", "attempt"}``; absent: unknown."""
META_PARTIAL = "partial"
"""Key in ``meta`` of a local marker: number of omitted files of other ranks; such a directory is incomplete."""
META_OWN_SHARDS = "own_shards"
"""Key in ``meta``: with the same world size each rank reads from ``sharded/`` only its own files and those of rank 0."""

UNSAVED_STATES = frozenset({"rejected", "lost", "given-up"})
"""Final states of checkpoints that are neither durable nor superseded, as ``POST /v1/flush`` reports them, once."""

_STEP_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class ContractError(ValueError):
    """A file of the contract violates format 1. The text is the reason."""


class LaterFormatError(ContractError):
    """A file of a later format, which a later version wrote: it is whole as far as is known."""

    def __init__(self, version: int, *, of: str = "") -> None:
        document = f"{of}: " if of else ""
        super().__init__(f"{document}format {version} is newer than this software, which reads {FORMAT}: update the sidecar")


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """Return the step of ``checkpoint-<step>``; ``None``: another name, such as ``checkpoint-007`` or ``checkpoint-20.tmp``."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of this name can be a checkpoint: ``checkpoint-<step>`` or ``final``."""
    return name == FINAL or step_of(name) is not None


def check_path(path: str) -> str:
    """Return a relative path unchanged if it stays inside its checkpoint.

    Raises:
        ContractError: Absolute, empty, or with ``.``, ``..``, empty parts or control characters; too long; not UTF-8; or a
            reserved name (``.ckpt/…``, ``.complete``).
    """
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ContractError(f"path {path[:200]!r} is not valid UTF-8") from None
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise ContractError(f"path {path[:200]!r} is not a plain path inside the checkpoint")
    if parts[0] in (SYSTEM_DIR, MARKER):
        raise ContractError(f"path {path[:200]!r} is reserved for the checkpoint system")
    if len(encoded) > MAX_PATH_BYTES:
        raise ContractError(f"path of {len(encoded)} bytes is longer than {MAX_PATH_BYTES}: {path[:60]!r}…")
    return path


def check_id(value: str, *, what: str) -> str:
    """Return an attempt or run id unchanged if it is safe as a part of an object key.

    Raises ``ContractError``: anything but 1–128 letters, digits, ``.``, ``_``, ``-``, beginning with a letter or digit.
    """
    if not _SAFE_ID.fullmatch(value):
        raise ContractError(f"{what} {value[:140]!r} must be 1–128 letters, digits, '.', '_' or '-'")
    return value
