"""Rules that are broken on purpose, one a line of ``MUTANTS``: each must be found by a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sidecar.catalog.catalog import Catalog
from sidecar.core.commit import commit, rewrite
from sidecar.core.commit import retention as retention_rules
from sidecar.core.commit.commit import ReadyToCommit
from sidecar.core.commit.rewrite import Replace
from sidecar.core.commit.training_line import Committed
from sidecar.lifecycle import known_attempts, take_over
from sidecar.repository.documents import Documents
from sidecar.retention import store_retention
from sidecar.upload.commit import committer, existing_commit
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.commit.reuploads import Reuploads
from sidecar.upload.commit.revocation import Revocation
from sidecar.upload.job import UploadJob


async def _passes(self: OverwriteGuard, **_: Any) -> None:
    return


async def _makes_no_way(self: Committer, name: str, **_: Any) -> bool:
    return True


async def _looks_at_no_commit(self: UploadJob, *_: Any) -> bool:
    return True


def _knows_of_nothing_damaged(self: Reuploads, version: str) -> frozenset[str]:
    return frozenset()


def _moves_nothing(self: Reuploads, version: str) -> dict[str, str]:
    return {}


async def _manifests_first(self: Committer, name: str, **_: Any) -> bool:
    there = await self.stored_commit(name)
    if there is not None:
        await self._executor.persistently(self._store.delete, await self._named_by(name, there))
        await self._executor.persistently(self._store.delete, [f"{name}/.complete"])
    return True


def _looks_at_no_object(manifests: Any, listing: Any, *, me: Any) -> Any:
    decision = commit.decide(manifests, listing, me=me)
    mine = any(m.node.index == me.index for m in manifests)
    return ReadyToCommit() if mine and len(manifests) == me.count else decision


def _mixes_saves(manifests: Any, listing: Any, *, me: Any) -> Any:
    return commit.decide([m.model_copy(update={"save_id": None}) for m in manifests], listing, me=me)


def _always_replaces(**_: Any) -> Replace:
    return Replace()


def _replaces_what_is_later(**given: Any) -> Any:
    decision = rewrite.rewrite(**given)
    return Replace() if isinstance(decision, rewrite.KeepExisting) else decision


async def _looks_at_nothing_again(self: PostCommitCheck, *_: Any, **__: Any) -> None:
    return


def _by_step(commits: Any) -> list[Committed]:
    return sorted(commits, key=lambda commit: commit.step, reverse=True)


async def _finds_nothing(self: Documents, *_: Any) -> None:
    return None


async def _finishes_nothing(self: Revocation, *_: Any) -> bool:
    return False


_why_not_whole = Documents.why_not_whole


async def _knows_no_quarantine(self: Documents, commit: Any, crc64nvme: str) -> str | None:
    return await _why_not_whole(self, commit, "0" * 16)


def _ranks_by_step(patch: pytest.MonkeyPatch) -> None:
    for module in (store_retention, retention_rules):
        patch.setattr(module, "present_line", _by_step)


def _as_before(patch: pytest.MonkeyPatch) -> None:
    """Ranks by step alone, at once, whatever became of the commit."""
    _ranks_by_step(patch)
    patch.setattr(store_retention, "SETTLED_S", 0.0)
    patch.setattr(Documents, "why_not_whole", _finds_nothing)


def _set(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


@dataclass(frozen=True)
class Mutant:
    """One broken rule."""

    kind: str
    """Of the schedules that show it."""
    apply: Callable[[pytest.MonkeyPatch], None]
    first_seed: int = 0
    """Where to begin for what shows in few schedules only: shortly before one that it breaks."""


MUTANTS: dict[str, Mutant] = {
    "the guard is open": Mutant("step", _set(OverwriteGuard, "pass_through", _passes), 3775),
    "commits without a look at the objects": Mutant("step", _set(committer, "decide", _looks_at_no_object)),
    "parts of different saves are committed together": Mutant("step", _set(committer, "decide", _mixes_saves)),
    "writes over what is committed": Mutant("step", _set(Committer, "revoke_commit", _makes_no_way)),
    "takes the manifests back before the commit": Mutant("step", _set(Committer, "revoke_commit", _manifests_first)),
    "takes back what a later attempt committed": Mutant("step", _set(existing_commit, "rewrite", _replaces_what_is_later)),
    "takes back what it committed itself": Mutant("step", _set(existing_commit, "rewrite", _always_replaces)),
    "writes without a look at the commit": Mutant("step", _set(UploadJob, "_may_replace", _looks_at_no_commit)),
    "adopts what is damaged": Mutant("step", _set(Reuploads, "damaged", _knows_of_nothing_damaged)),
    "writes under the key of another node": Mutant("step", _set(Reuploads, "moved", _moves_nothing)),
    "ranks by step, at once, unseen": Mutant("retention", _as_before),
    "ranks by step": Mutant("retention", _ranks_by_step),
    "does not wait for the post-commit checks": Mutant("retention", _set(store_retention, "SETTLED_S", 0.0)),
    "does not look at the objects": Mutant("retention", _set(Documents, "why_not_whole", _finds_nothing)),
    "knows no quarantine of others": Mutant("retention", _set(Documents, "why_not_whole", _knows_no_quarantine)),
    "never finishes a deletion": Mutant("retention", _set(Revocation, "finish_removal", _finishes_nothing)),
    "deletes nothing": Mutant("retention", _set(store_retention, "surplus_steps", lambda *_, **__: [])),
    "does not look again after the commit": Mutant("step", _set(PostCommitCheck, "_check", _looks_at_nothing_again), 600),
    "no version is ever replaced": Mutant("step", _set(Catalog, "is_replaced", lambda *_: False)),
    "an earlier pod takes over": Mutant("job", _set(take_over, "started_later", lambda *_, **__: False), 1700),
    "a commit does not wait for the present attempt": Mutant(
        "job", _set(known_attempts, "awaits_declaration", lambda *_, **__: None), 215
    ),
    "an upload is always current": Mutant("job", _set(Catalog, "is_current", lambda *_: True), 35),
}
