"""Names and limits: where everything lies on the shared volume, and what a path or id may look like."""

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

DEFAULT_DIR = "/checkpoints"
DEFAULT_API_PORT = 9470
PREEMPTED_EXIT_CODE = 143

MAX_MARKER_BYTES = 1 << 20
MAX_META_BYTES = 64 << 10
MAX_META_DEPTH = 64
"""Objects and arrays inside each other in ``meta``; readers of JSON give up somewhere above a hundred."""
MAX_NODES = 99_999
"""As many as the five digits in the names of manifests hold."""
MAX_PATH_BYTES = 900
"""Longest relative path of a file, UTF-8. S3 keys hold 1,024 bytes; the rest is for prefix, attempt and node."""

REASONS = frozenset({"periodic", "jit", "manual", "final"})
TRAINER_STATES = frozenset({"running", "preempted", "succeeded", "failed"})
ACTIONS = frozenset({"save", "save-and-stop"})
OUTCOMES = frozenset({"saved", "failed"})
NOTICE_SOURCES = frozenset({"sigterm", "prestop", "spot", "api", "fenced"})

SCRIPT_OWNED = "script"
"""Value of ``meta["owner"]`` for a checkpoint that the training script itself rotates: the sidecar never deletes it."""

META_OWNER = "owner"
META_TRAIN_CALL = "train_call"
"""Key in ``meta``: which ``train()`` call of the script, from 0 on, made the checkpoint; absent means 0."""
META_RESTORED = "restored"
"""Key in ``meta`` of a local marker: CRC64NVME of the commit that a directory was downloaded from; never uploaded again."""

META_RESUMED_FROM = "resumed_from"
"""Key in ``meta``: the checkpoint that the attempt continued from, ``{"step", "attempt"}``; absent: it is not known."""
META_PARTIAL = "partial"
"""Key in ``meta`` of a local marker: how many files of other ranks were left out; such a directory is no whole checkpoint."""
META_OWN_SHARDS = "own_shards"
"""Key in ``meta``: from ``sharded/`` each rank of a job of the same size reads its own files and those of rank 0."""

_STEP_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class ContractError(ValueError):
    """A file of the contract says something that format 1 does not allow. The text is the reason, for people."""


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for, or ``None`` if it is not ``checkpoint-<step>``.

    Canonical decimal only: ``checkpoint-007``, ``checkpoint-1e3``, ``checkpoint-20.tmp`` are other people's directories.
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of this name can be a checkpoint: ``checkpoint-<step>`` or ``final``."""
    return name == FINAL or step_of(name) is not None


def check_path(path: str) -> str:
    """Return a file's relative path unchanged if it stays inside its checkpoint.

    Raises:
        ContractError: Absolute, empty or with ``.``, ``..``, empty parts or control characters; too long; not UTF-8;
            or a name that this system owns (``.ckpt/…``, ``.complete``).
    """
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ContractError(f"path {path!r} is not valid UTF-8") from None
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise ContractError(f"path {path!r} is not a plain path inside the checkpoint")
    if parts[0] in (SYSTEM_DIR, MARKER):
        raise ContractError(f"path {path!r} is reserved for the checkpoint system")
    if len(encoded) > MAX_PATH_BYTES:
        raise ContractError(f"path of {len(encoded)} bytes is longer than {MAX_PATH_BYTES}: {path[:60]!r}…")
    return path


def check_id(value: str, *, what: str) -> str:
    """Return an attempt or run id unchanged if it is safe as a part of an object key.

    Raises:
        ContractError: Anything but 1–128 letters, digits, ``.``, ``_``, ``-``, beginning with a letter or digit.
    """
    if not _SAFE_ID.fullmatch(value):
        raise ContractError(f"{what} {value[:140]!r} must be 1–128 letters, digits, '.', '_' or '-'")
    return value
