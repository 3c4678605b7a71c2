"""The checkpoint that a run resumes from: requested of the sidecar, checked for missing files, the same for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook import contract
from trainer_hook.process.answers import ResumeResult
from trainer_hook.process.client import Client, SidecarAbsent
from trainer_hook.process.log import info, warn
from trainer_hook.process.progress_bar import bar
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.settings import Settings
from trainer_hook.resuming.shards import missing_shards
from trainer_hook.volume import lease
from trainer_hook.volume.checkpoint_folder import LocalCheckpoint, finished_on
from trainer_hook.volume.doubts import of_other_runs, reason_not_to_use

LATEST = "latest"
IsWanted = Callable[[Any], bool]
"""As ``is_wanted`` of ``Client.resume``."""
_FAIL_HINT = "CKPT_ON_STORE_FAILURE=fail exits instead, so that the job is started again"


def _always(_: Any) -> bool:
    return True


class CannotResume(SystemExit):
    """``CKPT_ON_STORE_FAILURE=fail``, and the checkpoint to resume from is unknown."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A directory on the volume that is complete for this trainer."""

    name: str
    path: Path
    meta: Mapping[str, Any]
    source: str | None = None
    """Origin of its files: ``store``; ``downloaded`` (from the store, before the request); ``local`` (written by a trainer);
    ``None``: unknown."""
    attempt: str | None = None
    """The attempt that saved it; ``None``: unknown."""

    @property
    def base_step(self) -> int:
        """Steps of the ``train()`` calls before the one that saved it."""
        base = self.meta.get("base_step", 0)
        return base if isinstance(base, int) else 0

    @property
    def step_in_call(self) -> int:
        """The Trainer's own step."""
        return (contract.step_of(self.name) or 0) - self.base_step


class Resumer:
    """Chooses one checkpoint per ``train()`` call; collective."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        consensus: RankConsensus,
        *,
        missing: Callable[..., list[str]],
        reads_all: bool = False,
        check: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Create it for one call.

        ``missing`` returns what a checkpoint lacks for one rank, with the arguments of ``Driver.missing_files``. ``reads_all``:
        loading may read files of any rank, so each node downloads all of them. ``check`` as ``Driver.check``.
        """
        self._check = check
        self._reads_all = reads_all
        self._missing = missing
        self._settings = settings
        self._client = client
        self._consensus = consensus
        self._volume = settings.dir
        self._refused: set[str] = set()
        """Names of checkpoints on the volume whose reason was logged already."""
        self._saves: dict[str, contract.SaveIdentity] = {}
        """Checkpoints that this node's sidecar has compared with the store, by name: their markers may be older."""
        self._is_out_of_time = False
        """A request has taken as long as it may: older steps would each take that again."""

    def choose(self, train_call: int) -> Choice | None:
        """Return the checkpoint that all ranks resume from; ``None``: training starts from scratch.

        Raises ``CannotResume``: the checkpoint is unknown, and the settings ask to fail then.
        """
        rank_0 = self._consensus.world.rank == 0
        self._is_out_of_time = False
        answer: ResumeResult = self._consensus.from_rank_0(self._ask(train_call) if rank_0 else None)
        while answer.checkpoint is not None:
            reason = self._problem(answer.checkpoint, fetches=not rank_0 and self._consensus.world.local_rank == 0)
            if self._consensus.all_agree(reason is None):
                folder = self._volume / answer.checkpoint
                marker = _marker(folder)
                # The sidecar calls a checkpoint that it downloaded before the request local.
                downloaded = answer.source == "local" and contract.META_RESTORED in marker.meta
                source = "downloaded" if downloaded else answer.source
                return Choice(answer.checkpoint, folder, answer.meta, source, self._identity(folder).attempt)
            if reason is not None:
                warn(f"{answer.checkpoint} is passed over: {reason}")
            in_time = self._consensus.all_agree(not self._is_out_of_time)
            older = self._older(answer.checkpoint, train_call, in_time=in_time) if rank_0 else None
            answer = self._consensus.from_rank_0(older)
        if not answer.known:
            if self._settings.fail_without_store:
                warn(f"exits 1 because CKPT_ON_STORE_FAILURE=fail: {answer.detail}")
                raise CannotResume(1)
            info(
                f"TRAINING STARTS FROM SCRATCH, although there may be a checkpoint to continue from: "
                f"{answer.detail}. {_FAIL_HINT}"
            )
        return None

    def final(self, train_call: int) -> Path | None:
        """Return the final model of a finished call; ``None``: not every node can have it."""
        path = self._volume / contract.FINAL
        there = self._fetch_on_node(contract.FINAL) is None if self._consensus.world.local_rank == 0 else True
        if not self._consensus.all_agree(there) or not self.is_same_on_all(path):
            return None
        marker = _marker(path)
        if not self._consensus.all_agree(self._unreadable(path) is None):
            return None
        return path if self._consensus.all_agree(contract.train_call_of(marker.meta) == train_call) else None

    def lacks(self, folder: Path) -> list[str]:
        """Return what a folder that the script names lacks, besides random state."""
        world, marker = self._consensus.world, _marker(folder)
        if contract.META_PARTIAL in marker.meta and marker.world_size != world.size:
            return ["files of other ranks"]
        return self._missing(_sizes(folder), rank=world.rank, world_size=world.size, saved_world_size=0)

    def fetch(self, name: str, *, is_wanted: IsWanted = _always) -> str | None:
        """Download a checkpoint on every node. Returns why not all ranks can use it; ``None``: they can.

        ``is_wanted`` as of ``Client.resume``.
        """
        reason = self._problem(name, fetches=self._consensus.world.local_rank == 0, is_wanted=is_wanted)
        return None if self._consensus.all_agree(reason is None) else reason or "another rank cannot use it"

    def is_usable(self, name: str) -> bool:
        """Whether a checkpoint on the volume has what the ranks of this node read: not only the files that they wrote."""
        return self._consensus.world.nodes == 1 or contract.META_RESTORED in _marker(self._volume / name).meta

    def is_same_on_all(self, folder: Path | None) -> bool:
        """Whether the folders of all nodes may be of one writing of the step; ``None``: there is none. Collective."""
        return self._consensus.all_agree(self._differs_from_rank_0(folder) is None)

    def _differs_from_rank_0(self, folder: Path | None) -> str | None:
        """Return why the folder of this node is not of the writing that rank 0 has; ``None``: it may be the same. Collective.

        A node without a sidecar may have its part, or an earlier download, of another attempt of the same step.
        """
        mine = self._identity(folder)
        first: contract.SaveIdentity = self._consensus.from_rank_0(mine)
        # Of a node, the rank that asked its sidecar compares.
        if self._consensus.world.local_rank != 0 or contract.may_be_same_save(mine, first):
            return None
        return f"it is of another save than that of rank 0 (here: {_told(mine)}; there: {_told(first)})"

    def _request(self, name: str, train_call: int | None, is_wanted: IsWanted = _always) -> ResumeResult:
        timeout_s, world = self._settings.resume_timeout_s, self._consensus.world
        apart = world.nodes > 1 and not self._reads_all
        share = {"world_size": world.size, "ranks": list(world.ranks)} if apart else None

        def is_awaited() -> bool:
            """Whether a sidecar holds the volume, and nothing on the volume can be resumed without an answer of a sidecar."""
            return lease.sidecar_holds(self._volume) and not self._is_here(name, train_call)

        self._saves.pop(name, None)
        until_s = time.monotonic() + timeout_s
        try:
            answer = self._client.resume(
                name,
                train_call=train_call,
                timeout_s=timeout_s,
                tell=info,
                bar=bar(),
                share=share,
                is_awaited=is_awaited,
                is_wanted=is_wanted,
            )
        finally:
            self._is_out_of_time |= time.monotonic() >= until_s
        if answer.checkpoint is not None and answer.save is not None:
            self._saves[answer.checkpoint] = answer.save
        return answer

    def _is_here(self, name: str, train_call: int | None) -> bool:
        """Whether a checkpoint can be resumed from without a sidecar."""
        if name == LATEST:
            return self._newest_local(train_call) is not None
        marker = _marker(self._volume / name)
        is_whole = bool(marker.files) and contract.META_PARTIAL not in marker.meta
        others = self._of_other_runs() if is_whole else None
        return others is not None and reason_not_to_use(self._volume, LocalCheckpoint(name, marker), others) is None

    def _of_other_runs(self) -> frozenset[str] | None:
        """Return ``of_other_runs``; ``None``: it is unknown, and no checkpoint is used without a sidecar."""
        try:
            return of_other_runs(self._volume)
        except OSError as error:
            warn(f"no checkpoint on the volume is used: it is unknown which ones another run left ({error})")
            return None

    def _ask(self, train_call: int) -> ResumeResult:
        try:
            answer = self._request(LATEST, train_call)
        except SidecarAbsent as absent:
            return self._local(train_call, str(absent))
        for name, reason in answer.passed_over:
            warn(f"{name} is passed over: {reason}")
        if answer.checkpoint is None and not answer.known:
            warn(f"no checkpoint is available: {answer.detail}")
            return self._local(train_call, str(answer.detail))
        return answer

    def _older(self, refused: str, train_call: int, *, in_time: bool) -> ResumeResult:
        """Return an older checkpoint than a refused one: of the store if all nodes are in time, else of the volume."""
        step, unknown = contract.step_of(refused) or 0, None
        if not in_time:
            late = f"not every node had {refused} in time: raise CKPT_RESUME_TIMEOUT_S, or look at its sidecar"
            return self._local(train_call, late, before_step=step)

        def is_awaited() -> bool:
            return lease.sidecar_holds(self._volume) and self._newest_local(train_call, before_step=step) is None

        timeout_s = self._settings.resume_timeout_s
        try:
            for name in self._client.older_checkpoints(step, timeout_s=timeout_s, tell=info, is_awaited=is_awaited):
                answer = self._request(name, train_call)
                if answer.checkpoint is not None:
                    return answer
                unknown = unknown if answer.known else str(answer.detail)
                if self._is_out_of_time:
                    unknown = unknown or f"{name} took as long as a resume may: raise CKPT_RESUME_TIMEOUT_S"
                    break
        except SidecarAbsent as absent:
            unknown = str(absent)
        return ResumeResult() if unknown is None else self._local(train_call, unknown, before_step=step)

    def _newest_local(self, train_call: int | None, before_step: int | None = None) -> LocalCheckpoint | None:
        """Return the newest whole checkpoint on the volume that has no parts on other nodes, and no reason against it.

        ``before_step``: only lower steps; ``None``: all. None with ``CKPT_ON_STORE_FAILURE=fail``.
        """
        if self._settings.fail_without_store:
            return None
        usable = [
            c
            for c in finished_on(self._volume)
            if (step := contract.step_of(c.name)) is not None
            and (before_step is None or step < before_step)
            and contract.META_PARTIAL not in c.marker.meta
            and (c.marker.node is None or c.marker.node.count == 1)
            and contract.train_call_of(c.marker.meta) == train_call
        ]
        if not usable or (others := self._of_other_runs()) is None:
            return None
        for newest in sorted(usable, key=lambda c: contract.step_of(c.name) or 0, reverse=True):
            if (reason := reason_not_to_use(self._volume, newest, others)) is None:
                return newest
            if newest.name not in self._refused:
                self._refused.add(newest.name)
                warn(f"{newest.name} is not used: {reason}")
        return None

    def _local(self, train_call: int, why: str, before_step: int | None = None) -> ResumeResult:
        newest = self._newest_local(train_call, before_step)
        if newest is None:
            return ResumeResult(detail=why, known=False)
        warn(f"{why}; continues from {newest.name}, the newest usable one on the volume")
        return ResumeResult(newest.name, "local", meta=dict(newest.marker.meta), known=False)

    def _identity(self, folder: Path | None) -> contract.SaveIdentity:
        if folder is None:
            return contract.identity_of(contract.Marker(), marked_s=None)
        if folder.parent == self._volume and folder.name in self._saves:
            return self._saves[folder.name]
        try:
            marked_s = (folder / contract.MARKER).stat().st_mtime
        except OSError:
            marked_s = None
        return contract.identity_of(_marker(folder), marked_s=marked_s)

    def _problem(self, name: str, *, fetches: bool, is_wanted: IsWanted = _always) -> str | None:
        """Return why this rank cannot use a checkpoint; ``None``: it can. ``fetches``: it downloads it first. Collective."""
        reason = self._fetch_on_node(name, is_wanted) if fetches else None
        self._consensus.all_agree(True)  # the other ranks of this node wait for its folder
        differs = self._differs_from_rank_0(self._volume / name)
        return reason or differs or self._incomplete(self._volume / name)

    def _fetch_on_node(self, name: str, is_wanted: IsWanted = _always) -> str | None:
        """Have this node's sidecar download a checkpoint. Returns why it cannot; ``None``: it is on the volume."""
        try:
            answer = self._request(name, None, is_wanted)
        except SidecarAbsent as absent:
            return None if self._is_here(name, None) else str(absent)
        if answer.checkpoint is not None:
            return None
        return answer.detail or "; ".join(reason for _, reason in answer.passed_over) or "not available on this node"

    def _incomplete(self, folder: Path) -> str | None:
        world = self._consensus.world
        try:
            marker = _read_marker(folder)
            files = _sizes(folder)
            shards = missing_shards(folder)
        except (OSError, ValueError) as error:
            return f"it cannot be read: {error}"
        changed = [f.path for f in marker.files or () if files.get(f.path) != f.size_bytes]
        missing = self._missing(files, rank=world.rank, world_size=world.size, saved_world_size=marker.world_size) + shards
        if missing or changed:
            why = "; was it saved with save_only_model?" if {"optimizer.pt", "scheduler.pt"} <= {*missing} else ""
            return f"{', '.join(dict.fromkeys([*missing, *changed]))} missing or incomplete: it cannot be resumed exactly{why}"
        if (reason := self._unreadable(folder)) is not None:
            return f"it cannot be read: {reason}"
        if marker.world_size not in (None, world.size):
            info(f"{folder.name}: saved by {marker.world_size} processes, now {world.size}; the random state differs")
        return None

    def _unreadable(self, folder: Path) -> str | None:
        try:
            self._check(folder)
        except (OSError, contract.ContractError) as error:
            return str(error)
        return None


def _marker(folder: Path) -> contract.Marker:
    """Return the marker of a folder; an empty one: there is none that can be read."""
    try:
        return _read_marker(folder)
    except (OSError, contract.ContractError):
        return contract.Marker()


def _read_marker(folder: Path) -> contract.Marker:
    return contract.parse_marker((folder / contract.MARKER).read_bytes(), name=folder.name)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _told(save: contract.SaveIdentity) -> str:
    said = {"attempt": save.attempt, "save": save.save_id, "finished at": save.finished_at}
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None) or "no marker"
