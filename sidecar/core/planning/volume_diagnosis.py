"""What measurements of the shared volume mean for a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sidecar.core.format.readable import size_text
from sidecar.core.lifecycle.volume_space import is_nearly_full
from sidecar.core.planning.findings import Finding, failure, is_full, ok, warning
from sidecar.core.planning.storage import measured_storage

LEAST_WATCHES = 1024
"""Watches of inotify below which directories of large checkpoints may be left unwatched; each directory needs one."""


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """What was measured of a directory. An error's text is ``None`` where the call succeeded."""

    path: str
    user: int
    groups: tuple[int, ...]
    """The process's own groups, the first one is its effective group."""
    owner: int | None = None
    """User of the directory; ``None``: it cannot be read."""
    group: int | None = None
    mode: int | None = None
    """Permission bits."""
    missing: str | None = None
    """Error of opening the directory."""
    write_error: str | None = None
    link_error: str | None = None
    rename_error: str | None = None
    inotify_error: str | None = None
    watches: int | None = None
    """``fs.inotify.max_user_watches``; ``None``: unknown."""
    free_bytes: int | None = None
    total_bytes: int | None = None
    other_owners: tuple[int, ...] = ()
    """Users of existing checkpoints, other than this one."""
    state_error: str | None = None
    """Error of writing to ``CKPT_STATE_DIR``."""


@dataclass(frozen=True, slots=True)
class SpaceNeeds:
    """What is to fit on the volume."""

    checkpoint_bytes: int | None
    """Size of one checkpoint; ``None``: unknown."""
    keep_local: int
    min_free_bytes: int


def volume_findings(facts: VolumeFacts, needs: SpaceNeeds) -> Iterator[Finding]:
    """Yield the findings about a volume."""
    if facts.missing is not None:
        text = f"{facts.path}: {facts.missing}: the volume that trainer and sidecar share is not there"
        yield failure("volume", text, "mount it in this container, or correct CKPT_DIR")
        return
    yield _writable(facts)
    if facts.write_error is None:
        yield from _links(facts)
        yield from _inotify(facts)
    yield from _space(facts, needs)
    if facts.state_error is not None:
        text = f"CKPT_STATE_DIR: {facts.state_error}: the sidecar does not start"
        yield failure("state-directory", text, "mount a writable emptyDir there, or unset CKPT_STATE_DIR")


def _writable(facts: VolumeFacts) -> Finding:
    who = f"this process is user {facts.user}, groups {', '.join(map(str, facts.groups))}"
    of = "" if facts.mode is None else f"{facts.path} belongs to {facts.owner}:{facts.group}, mode {facts.mode:04o}"
    if facts.write_error is None:
        return ok("volume", f"writable; {who}; {of}")
    is_read_only = "read-only" in facts.write_error.lower()
    fsgroup = "set the pod's securityContext.fsGroup, or run the sidecar as the trainer's user (inject --run-as-user)"
    step = "mount the volume without readOnly, and look for disk errors on its node" if is_read_only else fsgroup
    if is_full(facts.write_error):
        step = "free space on the volume, or enlarge it"
    return failure("volume", f"not writable: {facts.write_error}; {who}; {of}", step)


def _links(facts: VolumeFacts) -> Iterator[Finding]:
    if facts.rename_error is not None:
        text = f"a directory cannot be renamed: {facts.rename_error}: no resume can put a checkpoint in place"
        yield failure("rename", text, "use another file system for the volume")
    else:
        yield ok("rename", "directories can be renamed")
    lost = "a checkpoint that the trainer deletes before it is uploaded is lost"
    if facts.link_error is not None:
        yield warning(
            "hard-links",
            f"no hard links: {facts.link_error}: {lost}",
            "use a file system with hard links, or raise the trainer's save_total_limit",
        )
    elif facts.other_owners and facts.user != 0:
        owners = ", ".join(map(str, facts.other_owners))
        yield warning(
            "hard-links",
            f"checkpoints of user {owners} are there, and files of other users may not be linked: {lost}",
            "run the sidecar as the trainer's user (inject --run-as-user)",
        )
    else:
        yield ok("hard-links", "files can be linked")


def _inotify(facts: VolumeFacts) -> Iterator[Finding]:
    slower = "changes are found by polling, later"
    if facts.inotify_error is not None:
        step = "raise fs.inotify.max_user_instances and max_user_watches on the node"
        yield warning("inotify", f"{facts.inotify_error}: {slower}", step)
    elif facts.watches is not None and facts.watches < LEAST_WATCHES:
        text = f"{facts.watches} watches for all of this user's processes on the node: beyond them {slower}"
        yield warning("inotify", text, f"raise fs.inotify.max_user_watches on the node to {LEAST_WATCHES} or more")
    else:
        yield ok("inotify", "changes of directories are reported at once")


def _space(facts: VolumeFacts, needs: SpaceNeeds) -> Iterator[Finding]:
    free, total = facts.free_bytes, facts.total_bytes
    if free is None or total is None:
        return
    text = f"{size_text(free)} of {size_text(total)} are free"
    wanted = needs.min_free_bytes
    if needs.checkpoint_bytes is not None:
        wanted += measured_storage(needs.checkpoint_bytes, keep=needs.keep_local).storage_bytes
        if free < needs.checkpoint_bytes:
            yield failure("space", f"{text}: not one checkpoint fits", f"enlarge the volume to {size_text(wanted)}")
            return
    if free < wanted:
        yield warning(
            "space",
            f"{text}; {needs.keep_local} checkpoints (CKPT_KEEP_LOCAL), the one being written and CKPT_MIN_FREE take "
            f"{size_text(wanted)}",
            "enlarge the volume, or lower CKPT_KEEP_LOCAL: durable checkpoints are deleted earlier",
        )
    elif is_nearly_full(free, total, checkpoint_bytes=needs.checkpoint_bytes):
        yield warning("space", f"{text}: the volume is nearly full", "enlarge the volume or delete what it does not need")
    else:
        yield ok("space", text)
