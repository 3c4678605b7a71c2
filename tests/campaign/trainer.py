"""A trainer of files: it resumes, saves, patches, writes again and rotates, and remembers what it published."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.campaign.plan import Save
from tests.campaign.published import Files, Published, Version
from tests.campaign.reader import content_of
from tests.campaign.run import patience
from tests.process.sidecar_process import Sidecar

RESUME_S = 110.0
STEPS = 10
"""Between two saves."""
WRITTEN_AFTER_S = 0.03
"""A patch is later than the marker by more than the kernel's clock of files counts in."""


def content(seed: str, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def utc(format: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    return time.strftime(format, time.gmtime())


class Trainer(threading.Thread):
    """One life of a training process on a volume. ``sidecar`` gives the one that runs at the moment."""

    def __init__(
        self, volume: Path, published: Published, seed: str, *, sidecar: Callable[[], Sidecar], pod: str, rotates: int | None
    ) -> None:
        super().__init__(daemon=True)
        self._volume, self._published, self._seed, self._sidecar = volume, published, seed, sidecar
        self._pod, self._rotates = pod, rotates
        self._saves: queue.Queue[Save] = queue.Queue()
        self._stopping = threading.Event()
        self._busy = threading.Lock()
        self._attempt = f"{utc('%Y%m%dT%H%M%SZ')}-{pod}"
        self._style: str | None = None
        self.resumed: dict[str, Any] | None = None
        self.on_resume: Callable[[dict[str, Any]], object] = lambda _: None
        self.before_resume: Callable[[], object] = lambda: None
        self.newest: Version | None = None
        """What it saved last and left alone; ``None`` before the first, and while that is torn."""
        self.newest_s = 0.0
        """When its marker was there, by the monotonic clock."""
        self.was_told = False
        self.torn: set[str] = set()
        """Checkpoints that it began to write over: they may be lost, or rejected, which a sidecar reports."""
        self.rotated_s: dict[str, float] = {}
        """When it began to delete a checkpoint in its rotation, by the monotonic clock."""
        self.failed_saves = 0
        self.error: BaseException | None = None
        self._step = 0
        self._on_volume: list[str] = []

    def give(self, *saves: Save) -> None:
        for save in saves:
            self._saves.put(save)

    def idle(self) -> bool:
        """Whether all saves that it was given are written."""
        return not self.is_alive() or (self.resumed is not None and self._saves.unfinished_tasks == 0)

    def stop(self) -> None:
        """End between two saves. The lease is free then."""
        self._stopping.set()
        self.join(timeout=60)

    def run(self) -> None:
        try:
            (self._volume / ".ckpt/ranks").mkdir(parents=True, exist_ok=True)
            with (self._volume / ".ckpt/ranks/0.lease").open("w") as lease:
                fcntl.lockf(lease, fcntl.LOCK_EX)
                self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        self.before_resume()
        answer = self._resume()
        if answer["state"] == "ready":
            self._step = int(answer["step"])
        self.on_resume(answer)
        self.resumed = answer
        while not self._stopping.is_set():
            if (self._volume / ".ckpt/terminating").exists():
                self.was_told = True
                self._save(Save(0.0, (20_000,), self._style or "full"), reason="jit")
                return
            try:
                save = self._saves.get(timeout=0.05)
            except queue.Empty:
                continue
            try:
                if not self._stopping.wait(save.after_s):
                    self._save(save)
            finally:
                self._saves.task_done()

    def _resume(self) -> dict[str, Any]:
        began_s, asked = time.monotonic(), None
        while time.monotonic() - began_s < patience(RESUME_S) and not self._stopping.is_set():
            try:
                if asked is None:
                    asked = self._sidecar().call("POST", "/v1/resume", {"checkpoint": "latest", "asked_by": "trainer"})["id"]
                answer: dict[str, Any] = self._sidecar().call("GET", f"/v1/resume/{asked}?wait_s=1", timeout_s=10)
                if answer["http_status"] == 404:
                    asked = None
                elif answer["state"] in ("ready", "none", "failed"):
                    return answer
            except (OSError, KeyError, ValueError, HTTPException):  # no sidecar at the moment, or one that is stopped or ends
                time.sleep(0.1)
        return {"state": "no answer"}

    def _save(self, save: Save, reason: str = "periodic") -> None:
        self._step += STEPS
        name = f"checkpoint-{self._step}"
        self._style = self._style or save.marker
        try:
            self._write(name, save, reason)
        except OSError:  # a full or read-only volume: training goes on
            self.failed_saves += 1
            self.newest = None
            shutil.rmtree(self._volume / name, ignore_errors=True)
            return
        self._rotate()

    def _write(self, name: str, save: Save, reason: str) -> None:
        folder = self._volume / name
        shutil.rmtree(folder, ignore_errors=True)
        self.newest = None
        self._publish(folder, self._files(folder, save, "first", slowly=save.slowly), reason)
        self._on_volume.append(name)
        if save.mishap == "patched after the marker":
            self._patch(folder)
        elif save.mishap == "marker first gone, then killed":
            self.newest = None
            self.torn.add(name)
            (folder / ".complete").unlink()
            with (folder / "part-0").open("r+b") as file:
                file.write(b"torn")
        elif save.mishap:
            time.sleep(random.Random(self._seed + name).choice((0.0, 0.2, 0.8)))
            self.newest = None
            self.torn.add(name)
            (folder / ".complete").unlink()
            in_place = save.mishap == "written again in place"
            self._publish(folder, self._files(folder, save, "second", in_place=in_place), reason)

    def _patch(self, folder: Path) -> None:
        dice = random.Random(self._seed + folder.name)
        time.sleep(WRITTEN_AFTER_S + dice.choice((0.0, 0.1, 0.6)))
        self.newest = None
        self.torn.add(folder.name)
        with (folder / "part-0").open("r+b") as file:
            file.write(b"patched!")
        if dice.random() < 0.5:
            time.sleep(dice.choice((0.0, 0.3)))
            there = {path: (folder / path).read_bytes() for path in self._paths(folder)}
            self._publish(folder, {path: content_of(raw) for path, raw in there.items()}, "periodic")

    def _paths(self, folder: Path) -> list[str]:
        found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".complete")
        return [path.relative_to(folder).as_posix() for path in found]

    def _files(self, folder: Path, save: Save, writing: str, *, slowly: bool = False, in_place: bool = False) -> Files:
        written: Files = {}
        for number, size_bytes in enumerate(save.sizes):
            path = f"part-{number}" if number < 2 else f"deep/er {number}/pärt"
            raw = content(f"{self._seed} {self._pod} {folder.name} {writing} {number}", size_bytes)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if not in_place:
                (folder / path).unlink(missing_ok=True)
            with (folder / path).open("r+b" if in_place else "wb") as file:
                for at in range(0, len(raw), 2 << 20) if slowly else (0,):
                    file.write(raw[at : at + (2 << 20)] if slowly else raw)
                    file.flush()
                    time.sleep(0.4 if slowly and len(raw) > 4 << 20 else 0.0)
            written[path] = content_of(raw)
        return written

    def _publish(self, folder: Path, files: Files, reason: str) -> None:
        version = self._published.add(folder.name, self._pod, {0: files})
        marker = folder / ".complete"
        if self._style == "empty":
            marker.touch()
        elif self._style == "bare":
            marker.write_text("{}")
        else:
            told = {"format": 1, "step": self._step, "reason": reason, "attempt": self._attempt, "save_id": uuid.uuid4().hex}
            told |= {"created_at": utc(), "files": [{"path": path, "size_bytes": size} for path, (size, _) in files.items()]}
            temporary = folder / ".complete.tmp"
            with temporary.open("w") as file:
                json.dump(told, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(marker)
        self.newest, self.newest_s = version, time.monotonic()

    def _rotate(self) -> None:
        if self._rotates is not None:
            while len(self._on_volume) > self._rotates:
                name = self._on_volume.pop(0)
                self.rotated_s[name] = time.monotonic()
                shutil.rmtree(self._volume / name, ignore_errors=True)
