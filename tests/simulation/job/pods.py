"""Pods of a job: the production daemon on a volume, and a trainer that writes, resumes and dies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar.catalog.catalog import Tracked
from sidecar.core.lifecycle.states import PENDING, State
from sidecar.daemon.settings import Settings
from sidecar.download.request import RESUME_ENDED, AskedBy, ResumeState, ResumeStatus
from tests.simulation.job import reader
from tests.simulation.job.life import Life
from tests.simulation.job.loop import EPOCH_S, Process
from tests.simulation.job.store import JobStore
from tests.simulation.job.world import World
from trainer_hook.contract import MARKER, TRAINER_STATE, Node, rfc3339


@dataclass(frozen=True)
class Version:
    """What the trainer of one node finished."""

    name: str
    attempt: str
    save_id: str | None
    finished_s: float
    files: Mapping[str, bytes]
    skew_s: float = 0.0
    """By how much the clock of its pod is wrong."""

    @property
    def created_at(self) -> str:
        return rfc3339(EPOCH_S + self.finished_s + self.skew_s)


@dataclass(frozen=True)
class Choices:
    """Settings of all sidecars of a schedule."""

    keep_store: int | None = None
    keep_local: int = 2
    skips_superseded: bool = False
    part_bytes: int = 1 << 20
    job: str | None = "default/train"
    grace_s: float = 15.0


@dataclass
class Pod:
    """One node's pod: a volume, a sidecar that may be restarted, and a trainer."""

    world: World
    store: JobStore
    root: Path
    name: str
    node: Node
    attempt: str
    choices: Choices
    cut_off: tuple[float, float] = (0.0, 0.0)
    skew_s: float = 0.0
    """By how much the clock of its trainer is wrong."""
    began_s: float = 0.0
    """When its first sidecar process began."""
    early: bool = True
    life: Life | None = None
    trainer: Process | None = None
    lives: int = 0
    trains: bool = False
    has_saves_left: bool = False
    """Its script is not over."""
    is_gone: bool = False
    is_refused: bool = False
    versions: list[Version] = field(default_factory=list)
    durable: list[Version] = field(default_factory=list)
    """What its sidecars said was durable."""
    resumed_step: int | None = None
    dead: list[Life] = field(default_factory=list)
    """Earlier lives: kept, because dropping a coroutine runs its ``finally`` blocks."""

    def __repr__(self) -> str:
        return self.name

    def settings(self) -> Settings:
        choices = self.choices
        return Settings.model_construct(
            dir=self.root,
            store="memory://job",
            keep_store=choices.keep_store,
            keep_local=choices.keep_local,
            superseded="skip" if choices.skips_superseded else "upload",
            part_size=choices.part_bytes,
            node=self.node,
            is_first=self.node.index == 0,
            pod=self.name,
            pod_is_unique=choices.job is not None,
            job=choices.job,
            resume="on-demand",
            grace_seconds=choices.grace_s,
            concurrency=4,
        )

    # The sidecar.

    def begin(self) -> None:
        """Start the sidecar, or start it again."""
        if self.is_gone or self.life is not None:
            return
        self.lives += 1
        self.root.mkdir(exist_ok=True)
        self.world.tell(f"{self.name}#{self.lives} starts")
        self.life = Life(self)

    def crash(self, again_s: float | None) -> None:
        """Kill the sidecar alone; the kubelet starts it again."""
        if self.life is None or self.is_gone:
            return
        self._end_life("dies")
        if again_s is not None:
            self.world.at(self.world.now_s + again_s, self.begin)

    def refused(self) -> None:
        """Its sidecar ended with a configuration error: another job holds the prefix. The kubelet tries again."""
        self.is_refused = True
        self._end_life("is refused")
        self.world.at(self.world.now_s + 5.0, self.begin)

    def ended(self, exit_code: int) -> None:
        """Its sidecar ended by itself."""
        self.world.tell(f"{self.life} ends with exit code {exit_code}")
        self.world.counts[f"exit {exit_code}"] += 1
        latest = {version.name: version for version in self.versions}.values()
        if exit_code == 3 and all(self.store.holds(v.name, v.attempt, v.save_id, self.node.index, v.files) for v in latest):
            self.world.counts["exit 3 although all is committed"] += 1

    def terminate(self) -> None:
        """SIGTERM to all containers, SIGKILL after the grace period."""
        if self.is_gone:
            return
        self.world.tell(f"{self.name} gets SIGTERM")
        if self.life is not None and hasattr(self.life, "_in_life"):
            self.trains = False
            self.life.call(self.life.daemon._on_sigterm)
        self.world.at(self.world.now_s + self.choices.grace_s, self.kill)

    def kill(self) -> None:
        """The pod is gone, with its volume."""
        if self.is_gone:
            return
        self.is_gone, self.trains = True, False
        if self.trainer is not None:
            self.trainer.is_dead = True
        if self.life is not None:
            self._end_life("is gone")

    def _end_life(self, how: str) -> None:
        assert self.life is not None
        self.world.tell(f"{self.life} {how}")
        self.life.is_dead = True
        self.dead.append(self.life)
        self.life = None

    def said_durable(self, tracked: Tracked) -> None:
        checkpoint = tracked.checkpoint
        if checkpoint is None or checkpoint.restored_from is not None:
            return
        version = next(
            v for v in self.versions if (v.name, v.save_id, v.attempt) == (tracked.name, checkpoint.save_id, checkpoint.attempt)
        )
        self.world.tell(f"{self.life} says {version.name} save {version.save_id} is durable")
        self.durable.append(version)
        if not self.store.stood(version.name, self.node.index, version.files, version.finished_s):
            self.world.violate(f"{self.life} says {version.name} is durable, and no commit ever held it")

    def may_replace(self, name: str, commit: reader.Named) -> bool:
        """Whether this pod ever finished something that is later than a commit, or is another save of its attempt."""
        return commit.created_at is None or any(
            v.name == name
            and (
                (v.attempt == commit.attempt and v.save_id != commit.save_id)
                or (v.attempt != commit.attempt and self.store.attempts.counts_as_later(v, commit))
            )
            for v in self.versions
        )

    @property
    def is_alive(self) -> bool:
        return self.life is not None and not self.is_gone and self.life.exit_code is None

    @property
    def is_quiet(self) -> bool:
        return self.life is not None and self.life.is_quiet

    def gave_up(self, name: str) -> bool:
        """Whether its sidecar ended before a checkpoint was durable: the next one may still send it."""
        tracked = self.life.services.catalog.get(name) if self.life is not None else None
        return tracked is not None and tracked.state is State.GIVEN_UP

    def states(self) -> dict[str, str]:
        if self.life is None:
            return {}
        return {t.name: f"{t.state.value} ({t.reason})" for t in self.life.services.catalog.all()}

    def pending(self) -> list[str]:
        return [] if self.life is None else [t.name for t in self.life.services.catalog.all() if t.state in PENDING]

    # The trainer.

    def train(self, saves: list[Save], *, resumes: bool, rotates: int | None) -> None:
        """Start the trainer."""
        if self.is_gone:
            return
        self.trainer = Process(f"trainer of {self.name}")
        self.trains = self.has_saves_left = True
        self.world.loop.spawn(self.trainer, self._train(saves, resumes=resumes, rotates=rotates))

    async def _train(self, saves: list[Save], *, resumes: bool, rotates: int | None) -> None:
        self._say_attempt()
        began_s = self.world.now_s
        base = 0
        if resumes:
            base = await self.resume() or 0
            self.resumed_step = base
        began_s = max(began_s, self.world.now_s)
        for save in saves:
            await asyncio.sleep(max(0.0, began_s + save.at_s - self.world.now_s))
            await self._save(save, base + save.step)
            self._rotate(rotates)
        self.has_saves_left = False
        # The script is over, and the pod stays: what it finished is still to become durable.

    def _say_attempt(self) -> None:
        state = {"state": "running", "attempt": self.attempt, "step": 0, "world_size": self.node.count, "pid": 1}
        place = self.root / TRAINER_STATE
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(state | {"updated_at": rfc3339(self.world.epoch())}))

    async def _save(self, save: Save, step: int) -> None:
        name = f"checkpoint-{step}"
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = save.files(self, step)
        self.world.tell(f"trainer of {self.name} begins {name}")
        for path, content in files.items():
            half = len(content) // 2
            if save.per_file_s:
                self._write(folder / path, content[:half])
                await asyncio.sleep(save.per_file_s / 2)
            self._write(folder / path, content)
            if self.life is not None:
                self.life.hints.closed_after_writing(folder / path, self.world.epoch())
            if save.per_file_s:
                await asyncio.sleep(save.per_file_s / 2)
        self._finish(name, save, files)

    def _write(self, path: Path, content: bytes) -> None:
        with path.open("r+b" if path.exists() else "xb") as file:
            file.seek(0)
            file.write(content)
        self._stamp(path)

    def _stamp(self, path: Path) -> None:
        now_ns = int(self.world.epoch() * 1e9)
        os.utime(path, ns=(now_ns, now_ns))

    def _finish(self, name: str, save: Save, files: dict[str, bytes]) -> None:
        version = Version(name, self.attempt, save.save_id, self.world.now_s, files, self.skew_s)
        marker: dict[str, Any] = {
            "format": 1,
            "attempt": self.attempt,
            "created_at": version.created_at,
            "node": {"index": self.node.index, "count": self.node.count},
            "files": [{"path": path, "size_bytes": len(content)} for path, content in files.items()],
        }
        if save.save_id is not None:
            marker["save_id"] = save.save_id
        if save.reason is not None:
            marker["reason"] = save.reason
        self.versions.append(version)
        self.store.written.setdefault((name, self.attempt, save.save_id), {})[self.node.index] = dict(files)
        place = self.root / name / MARKER
        building = place.with_name(".complete.tmp")
        building.write_text(json.dumps(marker))
        self._stamp(building)
        building.rename(place)
        self.world.tell(f"trainer of {self.name} finished {name} save {save.save_id}")
        if self.life is not None:
            self.life.call(self.life.hints.wake) if hasattr(self.life, "_in_life") else None

    def _rotate(self, keep: int | None) -> None:
        if keep is None:
            return
        there = sorted((p for p in self.root.glob("checkpoint-*")), key=lambda p: reader.step_of(p.name))
        for old in there[:-keep]:
            shutil.rmtree(old)

    async def resume(self) -> int | None:
        """Ask for ``latest`` until there is an answer, and check it. Returns the step, ``None``: from scratch."""
        while True:
            life = self.life
            if life is None or not hasattr(life, "_in_life"):
                await asyncio.sleep(0.3)
                continue
            asked_s = self.world.now_s
            service = life.services.resume_service
            status: ResumeStatus | None = life.call(service.request, asked_by=AskedBy.TRAINER)
            assert status is not None
            identifier = status.id
            while status is not None and status.state not in RESUME_ENDED and self.life is life:
                await asyncio.sleep(0.1)
                status = service.status(identifier)
            if self.life is not life or status is None:
                continue
            self.world.tell(f"{life} answers the resume: {status.state.value} {status.checkpoint} {status.detail or ''}")
            if status.state is ResumeState.FAILED:
                self._check_failed(status, asked_s)
                await asyncio.sleep(1.0)
                continue
            self._check_resume(status, asked_s)
            return status.step

    def _check_failed(self, status: ResumeStatus, asked_s: float) -> None:
        """A commit may be damaged, or be revoked by another node while it is read; but not while an older step is whole.

        Nodes ask for themselves here, as shell scripts do; under the hook they wait for each other before they train.
        """
        self.world.counts["resume failed"] += 1
        newest = None if self.world.faults.hidden else self.store.newest_whole_since(asked_s)
        if newest is not None:
            self.world.violate(f"{self.life} could not resume, and step {newest} was whole: {status.detail}")

    def _check_resume(self, status: ResumeStatus, asked_s: float) -> None:
        """The first promise: the newest step that is whole, byte for byte."""
        world = self.world
        world.counts[f"resume {status.state.value}"] += 1
        newest = None if world.faults.hidden else self.store.newest_whole_since(asked_s)
        if status.state is ResumeState.NONE:
            if newest is not None:
                world.violate(f"{self.life} found nothing to resume from, and step {newest} was whole: {status.passed_over}")
            return
        assert status.path is not None
        if newest is not None and (status.step or 0) < newest and status.source == "store":
            world.violate(f"{self.life} resumes from step {status.step}, and step {newest} was whole: {status.passed_over}")
        found = {
            str(p.relative_to(status.path)): p.read_bytes()
            for p in Path(status.path).rglob("*")
            if p.is_file() and p.name != MARKER
        }
        name = Path(status.path).name
        wanted = [
            reader.for_node(self.node.index, parts)
            for (its, _, _), parts in self.store.written.items()
            if its == name and len(parts) >= 1
        ]
        own = [dict(version.files) for version in self.versions if version.name == name]
        if found not in [*wanted, *own]:
            world.violate(f"{self.life} resumed {name} with {found}, and nobody wrote that: {wanted}")


@dataclass(frozen=True)
class Save:
    """One save of the trainer, by all nodes alike but for its time."""

    step: int
    """Steps after the one that the trainer began from."""
    at_s: float
    """When it begins, after training began."""
    save_id: str | None
    per_file_s: float
    seed: str
    """Decides the content."""
    large_bytes: int
    collides: bool
    reason: str | None = None

    def files(self, pod: Pod, step: int) -> dict[str, bytes]:
        of = f"{self.seed}-{step}"
        index = pod.node.index
        shard = f"{of}-{index}-".encode()
        shard += b"." * (self.large_bytes - len(shard))
        files = {f"shard-{index}": shard, "config": b"{}", f"static-{index}": b"the same in each step"}
        if self.collides:
            files["rng"] = f"{of} of {index}".encode()
        return files


__all__ = ["Choices", "Pod", "Save", "Version"]
