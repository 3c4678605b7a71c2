"""The contract between trainer and sidecar, format 1: names, markers and small files in the shared volume.

The one module that both containers import. Standard library only, and no I/O: everything here turns text or bytes
into values and back. FORMAT.md is its prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Final

FORMAT: Final = 1

MARKER = ".complete"
SYSTEM_DIR = ".ckpt"
FINAL = "final"

LEASES = f"{SYSTEM_DIR}/ranks"
TRAINER_STATE = f"{SYSTEM_DIR}/trainer.json"
TERMINATING = f"{SYSTEM_DIR}/terminating"
REQUEST = f"{SYSTEM_DIR}/request.json"
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
NOTICE_SOURCES = frozenset({"sigterm", "prestop", "spot", "api"})

SCRIPT_OWNED = "script"
"""Value of ``meta["owner"]`` for a checkpoint that the training script itself rotates: the sidecar never deletes it."""

META_OWNER = "owner"
META_TRAIN_CALL = "train_call"
"""Key in ``meta``: which ``train()`` call of the script, from 0 on, made the checkpoint; absent means 0."""
META_RESTORED = "restored"
"""Key in ``meta`` of a local marker: CRC64NVME of the commit that a directory was downloaded from; never uploaded again."""

SHARED_SETTINGS = frozenset(
    {"CKPT_DIR", "CKPT_NODE_INDEX", "CKPT_NODE_COUNT", "CKPT_GRACE_SECONDS", "CKPT_API_PORT", "CKPT_LOG"}
)
HOOK_SETTINGS = SHARED_SETTINGS | {
    "CKPT_HOOK",
    "CKPT_SAVE_STRATEGY",
    "CKPT_SAVE_STEPS",
    "CKPT_SAVE_MINUTES",
    "CKPT_SAVE_TOTAL_LIMIT",
    "CKPT_JIT",
    "CKPT_ASYNC",
    "CKPT_RESUME_TIMEOUT_S",
    "CKPT_SIDECAR_URL",
    "CKPT_ON_STORE_FAILURE",
    "CKPT_PREEMPTED_EXIT_CODE",
}
SIDECAR_SETTINGS = SHARED_SETTINGS | {
    "CKPT_STORE",
    "CKPT_RUN_ID",
    "CKPT_CREDENTIALS_DIR",
    "CKPT_VERIFY_TLS",
    "CKPT_CA_BUNDLE",
    "CKPT_VERIFY_ACCESS",
    "CKPT_VERIFY",
    "CKPT_KEEP_LOCAL",
    "CKPT_KEEP_STORE",
    "CKPT_KEEP_EVERY_STEPS",
    "CKPT_SUPERSEDED",
    "CKPT_BANDWIDTH_LIMIT",
    "CKPT_CONCURRENCY",
    "CKPT_PART_SIZE",
    "CKPT_MIN_FREE",
    "CKPT_SSE",
    "CKPT_SSE_KMS_KEY_ID",
    "CKPT_RESUME",
    "CKPT_RESUME_FOREIGN",
    "CKPT_MODE",
    "CKPT_SPOT",
    "CKPT_API_TOKEN",
    "CKPT_METRICS_BIND",
}
KNOWN_SETTINGS = HOOK_SETTINGS | SIDECAR_SETTINGS
"""Every ``CKPT_*`` variable of either container: a pod template may set all of them in both."""

_STEP_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_POD_UID = re.compile(r"/pods/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/")


class ContractError(ValueError):
    """A file of the contract says something that format 1 does not allow. The text is the reason, for people."""


@dataclass(frozen=True, slots=True)
class Node:
    """Place of this pod in the job: ``index`` of ``count``, both from zero and one."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ContractError(f"node {self.index} of {self.count} does not exist: index must be 0 … count-1")
        if self.count > MAX_NODES:
            raise ContractError(f"node count {self.count} is larger than {MAX_NODES}")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file that the writer vouches for. ``path`` is relative to the checkpoint, with forward slashes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of ``.complete``. ``None`` means that the writer did not say; an empty file is ``Marker()``."""

    step: int | None = None
    reason: str | None = None
    created_at: str | None = None
    attempt: str | None = None
    node: Node | None = None
    world_size: int | None = None
    global_step_seconds: float | None = None
    files: tuple[ListedFile, ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Content of ``trainer.json``. ``updated_at`` is RFC 3339."""

    state: str
    attempt: str | None = None
    step: int | None = None
    world_size: int | None = None
    pid: int | None = None
    updated_at: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Content of ``request.json``: what the sidecar asks of the trainer."""

    id: str
    action: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Content of ``terminating``. An empty file is a notice too: ``at`` and ``source`` are then ``None``."""

    at: str | None = None
    source: str | None = None


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


def parse_marker(raw: bytes, *, name: str) -> Marker:
    """Read the content of ``<name>/.complete``.

    Raises:
        ContractError: Not format 1; the text says which field.
    """
    if len(raw) > MAX_MARKER_BYTES:
        raise ContractError(f"marker of {len(raw)} bytes is larger than {MAX_MARKER_BYTES}")
    if not raw.strip():
        return Marker()
    fields = _json_object(raw, what="marker")
    _expect_format(fields)
    step = _integer(fields, "step")
    named = step_of(name)
    if step is not None and named is not None and step != named:
        raise ContractError(f"marker says step {step}, directory is named {name}")
    attempt = _typed(fields, "attempt", str)
    return Marker(
        step=step,
        reason=_one_of(fields, "reason", REASONS),
        created_at=_timestamp(fields, "created_at"),
        attempt=None if attempt is None else check_id(attempt, what="attempt"),
        node=_node(fields),
        world_size=_integer(fields, "world_size", least=1),
        global_step_seconds=_seconds(fields, "global_step_seconds"),
        files=_files(fields),
        meta=_meta(fields),
    )


def encode_marker(marker: Marker) -> bytes:
    """Return the JSON of a marker; fields that are ``None`` are left out."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "step": marker.step,
        "reason": marker.reason,
        "created_at": marker.created_at,
        "attempt": marker.attempt,
        "node": None if marker.node is None else {"index": marker.node.index, "count": marker.node.count},
        "world_size": marker.world_size,
        "global_step_seconds": marker.global_step_seconds,
        "files": None if marker.files is None else [{"path": f.path, "size_bytes": f.size_bytes} for f in marker.files],
        "meta": dict(marker.meta) or None,
    }
    return encode_json(fields)


def parse_trainer_state(raw: bytes) -> TrainerState:
    """Read ``trainer.json``.

    Raises:
        ContractError: Not a JSON object with a known state.
    """
    fields = _json_object(raw, what="trainer.json")
    state = _one_of(fields, "state", TRAINER_STATES)
    if state is None:
        raise ContractError("trainer.json has no state")
    return TrainerState(
        state=state,
        attempt=_typed(fields, "attempt", str),
        step=_integer(fields, "step"),
        world_size=_integer(fields, "world_size", least=1),
        pid=_integer(fields, "pid"),
        updated_at=_timestamp(fields, "updated_at"),
    )


def encode_trainer_state(state: TrainerState) -> bytes:
    """Return the JSON of ``trainer.json``."""
    return encode_json({name: getattr(state, name) for name in TrainerState.__slots__})


def parse_request(raw: bytes) -> Request:
    """Read ``request.json``.

    Raises:
        ContractError: No id, or an action other than ``save`` and ``save-and-stop``.
    """
    fields = _json_object(raw, what="request.json")
    identifier, action = _typed(fields, "id", str), _one_of(fields, "action", ACTIONS)
    if not identifier or action is None:
        raise ContractError("request.json needs id and action")
    return Request(identifier, action)


def encode_request(request: Request) -> bytes:
    """Return the JSON of ``request.json``."""
    return encode_json({"id": request.id, "action": request.action})


def parse_notice(raw: bytes) -> Notice:
    """Read ``terminating``. Whatever it holds, the file's existence is the notice: unreadable content is an empty one."""
    try:
        fields = _json_object(raw, what="terminating")
        return Notice(_timestamp(fields, "at"), _one_of(fields, "source", NOTICE_SOURCES))
    except ContractError:
        return Notice()


def encode_notice(notice: Notice) -> bytes:
    """Return the JSON of ``terminating``."""
    return encode_json({"at": notice.at, "source": notice.source})


def node_from_environment(environ: Mapping[str, str]) -> Node | None:
    """Return this pod's place in the job from the first naming that is set.

    ``CKPT_NODE_INDEX``/``CKPT_NODE_COUNT``, then torchrun's ``PET_NODE_RANK``/``PET_NNODES`` (a range such as ``1:4`` means
    several), then the indexed Job's ``JOB_COMPLETION_INDEX``. Nothing set means one node; an index alone means several.

    Returns:
        ``None`` when the pod is one of several but the environment does not say which of how many; then the marker must.

    Raises:
        ContractError: A value that is not an integer, or an index outside the count. The text names the variable.
    """
    index_name = _first_set(environ, "CKPT_NODE_INDEX", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    count_name = _first_set(environ, "CKPT_NODE_COUNT", "PET_NNODES")
    if count_name is None:
        return None if index_name else Node()
    count = _environment_integer(environ, count_name, or_range=count_name == "PET_NNODES")
    if count == 1 and index_name != "CKPT_NODE_INDEX":
        return Node()  # an indexed Job of independent trainings has indices, too
    index = _environment_integer(environ, index_name) if index_name else None
    if count == 0:
        raise ContractError(f"{count_name} must be 1 or more, not 0")
    if count is None or index is None:
        return None
    try:
        return Node(index, count)
    except ContractError as error:
        raise ContractError(f"{index_name}={index}, {count_name}={count}: {error}") from None


def pod_uid(mountinfo: str) -> str | None:
    """Return the pod's UID from the text of ``/proc/self/mountinfo``, or ``None`` outside Kubernetes.

    Source: kubelet mounts ``/etc/hosts`` and volumes from ``/var/lib/kubelet/pods/<uid>/``.
    """
    match = _POD_UID.search(mountinfo)
    return match[1] if match else None


def rfc3339(epoch_s: float) -> str:
    """Return a moment as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(epoch_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch_seconds(timestamp: str) -> float:
    """Return the epoch seconds of an RFC 3339 timestamp.

    Raises:
        ContractError: Not a timestamp with a time zone.
    """
    try:
        moment = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        raise ContractError(f"{timestamp!r} is not an RFC 3339 timestamp") from None
    if moment.tzinfo is None:
        raise ContractError(f"{timestamp!r} has no time zone")
    if not 1 < moment.year < 9999:  # at the ends a time zone leads out of what can be written again
        raise ContractError(f"{timestamp!r} is not a time of this calendar")
    return moment.timestamp()


def encode_json(fields: Mapping[str, Any]) -> bytes:
    """Return one line of JSON with the fields that are not ``None``."""
    kept = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(kept, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _json_object(raw: bytes, *, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _expect_format(fields: Mapping[str, Any]) -> None:
    version = _integer(fields, "format", least=1)
    if version not in (None, FORMAT):
        raise ContractError(f"format {version} is newer than this software, which reads {FORMAT}: update the sidecar")


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise ContractError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise ContractError(f"{name} must be an integer from {least} on, not {str(value)[:60]!r}")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ContractError(f"{name} must be a number of seconds, not {str(value)[:60]!r}")
    return float(value)


def _timestamp(fields: Mapping[str, Any], name: str) -> str | None:
    value: str | None = _typed(fields, name, str)
    if value is not None:
        epoch_seconds(value)
    return value


def _one_of(fields: Mapping[str, Any], name: str, allowed: frozenset[str]) -> str | None:
    value: str | None = _typed(fields, name, str)
    if value is not None and value not in allowed:
        raise ContractError(f"{name} is {value[:60]!r}, must be one of {', '.join(sorted(allowed))}")
    return value


def _meta(fields: Mapping[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = _typed(fields, "meta", dict) or {}
    if not _is_shallow(meta, MAX_META_DEPTH):
        raise ContractError(f"meta is nested deeper than {MAX_META_DEPTH}")
    try:
        # Python reads NaN, 1e999 and half surrogates, but nobody can write them into the documents of the store.
        json.dumps(meta, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ContractError(f"meta holds what JSON cannot: {str(error)[:200]}") from None
    if len(json.dumps(meta)) > MAX_META_BYTES:
        raise ContractError(f"meta is larger than {MAX_META_BYTES} bytes")
    return meta


def _is_shallow(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return children is None or (levels > 0 and all(_is_shallow(child, levels - 1) for child in children))


def _node(fields: Mapping[str, Any]) -> Node | None:
    node = _typed(fields, "node", dict)
    if node is None:
        return None
    index, count = _integer(node, "index"), _integer(node, "count", least=1)
    if index is None or count is None:
        raise ContractError("node needs index and count")
    return Node(index, count)


def _files(fields: Mapping[str, Any]) -> tuple[ListedFile, ...] | None:
    listed = _typed(fields, "files", list)
    if listed is None:
        return None
    files = []
    for entry in listed:
        if not isinstance(entry, dict):
            raise ContractError("files must hold objects with path and size_bytes")
        path, size_bytes = _typed(entry, "path", str), _integer(entry, "size_bytes")
        if path is None or size_bytes is None:
            raise ContractError("a listed file needs path and size_bytes")
        files.append(ListedFile(check_path(path), size_bytes))
    if len({f.path for f in files}) != len(files):
        raise ContractError("files lists a path twice")
    return tuple(files)


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _environment_integer(environ: Mapping[str, str], name: str, *, or_range: bool = False) -> int | None:
    """Return the number, or ``None`` for a range of torchrun's, ``least:most``, that leaves it open."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", environ[name].strip(), re.ASCII)
    if not match or (match[2] and not or_range):
        raise ContractError(f"{name} must be a whole number, not {environ[name]!r}")
    return int(match[1]) if match[2] is None or int(match[1]) == int(match[2]) else None
