"""Environment variables: the settings of both containers, and this pod's place in the job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer_hook.contract.marker import Node
from trainer_hook.contract.names import ContractError

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
    "CKPT_STATE_DIR",
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
    "CKPT_S3_CLIENT",
    "CKPT_SSE",
    "CKPT_SSE_KMS_KEY_ID",
    "CKPT_S3_ACL",
    "CKPT_S3_REQUEST_PAYER",
    "CKPT_RESUME",
    "CKPT_MODE",
    "CKPT_INSTALL_HOOK",
    "CKPT_SPOT",
    "CKPT_SPOT_ENDPOINT",
    "CKPT_API_TOKEN",
    "CKPT_METRICS_BIND",
}
KNOWN_SETTINGS = HOOK_SETTINGS | SIDECAR_SETTINGS
"""A pod template may set the variables of both containers in each."""
REMOVED_SETTINGS = {
    "CKPT_RESUME_FOREIGN": "bring a checkpoint of another system to a new prefix once: make an empty .complete in its folder, "
    "then 'checkpoint-sidecar push FOLDER STORE'"
}
"""Variables of earlier versions, with a replacement. Set to "off", they are ignored."""

_OFF = ("", "0", "false", "no", "off")
_POD_UID = re.compile(r"/pods/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/")


def check_settings(environ: Mapping[str, str]) -> None:
    """Refuse a ``CKPT_*`` variable that neither container knows, such as a misspelt one.

    Raises ``ContractError``: names the variable and the nearest known one, or the replacement of a removed one.
    """
    for name in sorted(environ):
        if name in REMOVED_SETTINGS:
            if environ[name].strip().lower() in _OFF:  # a manifest of an older version, with the feature off
                continue
            raise ContractError(f"{name} is not a setting any more: {REMOVED_SETTINGS[name]}")
        if name.startswith("CKPT_") and name not in KNOWN_SETTINGS:
            import difflib

            near = difflib.get_close_matches(name, KNOWN_SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else "no setting has a similar name; remove it"
            raise ContractError(f"{name} is not a setting: {hint}")


def node_from_environment(environ: Mapping[str, str]) -> Node | None:
    """Return this pod's place in the job from the first set of variables that is present.

    ``CKPT_NODE_INDEX``/``CKPT_NODE_COUNT``, then torchrun's ``PET_NODE_RANK``/``PET_NNODES`` (a range such as ``1:4`` means
    several), then the indexed Job's ``JOB_COMPLETION_INDEX``. Nothing set means one node; an index alone means several.

    Returns:
        ``None``: the pod is one of several, but the environment lacks its index or their number; then the marker has them.

    Raises ``ContractError``: a value that is not an integer, or an index outside the count. The text names the variable.
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


def port_number(text: str) -> int:
    """Return the TCP port that a text names; 0 stands for any free one.

    Raises ``ValueError``: the text is no whole number from 0 to 65535 in ASCII digits.
    """
    if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or int(text) > 65535:
        raise ValueError("must be a port from 1 to 65535, or 0 for any free one")
    return int(text)


def pod_uid(mountinfo: str) -> str | None:
    """Return the pod's UID from the text of ``/proc/self/mountinfo``, or ``None`` outside a pod, such as on a node itself.

    Source: kubelet mounts ``/etc/hosts`` and volumes from ``/var/lib/kubelet/pods/<uid>/``. On the node such folders are mount
    points. Fields: proc_pid_mountinfo(5), the fourth is the mounted folder, the fifth the mount point. Where the node is itself
    a container of a pod (kind), the folder is below that pod's, and the last UID counts.
    """
    mounts = (line.split(" ", 5) for line in mountinfo.splitlines())
    folders = (fields[3] for fields in mounts if len(fields) > 4 and not _POD_UID.search(fields[4]))
    uids = {found[-1] for found in map(_POD_UID.findall, folders) if found}
    return uids.pop() if len(uids) == 1 else None


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _environment_integer(environ: Mapping[str, str], name: str, *, or_range: bool = False) -> int | None:
    """Return the number; ``None``: torchrun's range ``least:most``."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", environ[name].strip(), re.ASCII)
    if not match or (match[2] and not or_range):
        raise ContractError(f"{name} must be a whole number, not {environ[name]!r}")
    return int(match[1]) if match[2] is None or int(match[1]) == int(match[2]) else None
