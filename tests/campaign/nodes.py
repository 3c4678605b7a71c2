"""A run of several nodes: a part of each checkpoint on each, nodes that are cut off, replaced and restarted, and another
number of nodes at the resume."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.campaign.plan import Attempt, NodeAct, Save
from tests.campaign.pods import EXIT_GIVEN_UP, EXIT_OK, SLACK_S, Pod
from tests.campaign.proxy import StoreProxy
from tests.campaign.published import Files, Version
from tests.campaign.reader import content_of
from tests.campaign.run import HEALED_S, Run, ends, patience
from tests.campaign.trainer import STEPS, content, utc

LAST = Attempt((Save(0.1, (9_000, 4_000), "full"), Save(0.2, (8_000,), "full")), (), ())
RESUME_S = 100.0
ENDS_ATTEMPT = ("replaced while it lives", "pod lost")


class Node(Pod):
    """One node of a job, with a way to the store of its own."""

    def __init__(self, run: Run, uid: str, volume: Path, settings: Mapping[str, str], proxy: StoreProxy | None) -> None:
        super().__init__(run, uid, volume, settings)
        self.proxy = proxy
        self._lease: Any = None

    def hold_lease(self) -> None:
        """Do as a training process that lives."""
        if self._lease is None:
            (self.volume / ".ckpt/ranks").mkdir(parents=True, exist_ok=True)
            self._lease = (self.volume / ".ckpt/ranks/0.lease").open("w")
            fcntl.lockf(self._lease, fcntl.LOCK_EX)

    def free_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def ask(self, checkpoint: str, *, within_s: float) -> dict[str, Any]:
        """Return the answer to a resume."""
        began_s, asked = time.monotonic(), None
        while time.monotonic() - began_s < patience(within_s):
            try:
                if asked is None:
                    asked = self.sidecar.call("POST", "/v1/resume", {"checkpoint": checkpoint, "asked_by": "trainer"})["id"]
                answer: dict[str, Any] = self.sidecar.call("GET", f"/v1/resume/{asked}?wait_s=1", timeout_s=10)
                if answer["http_status"] == 404:
                    asked = None
                elif answer["state"] in ("ready", "none", "failed"):
                    return answer
            except (OSError, KeyError, ValueError, HTTPException):
                time.sleep(0.1)
        return {"state": "no answer"}

    def write(self, name: str, files: Mapping[str, bytes], marker: Mapping[str, Any], *, in_place: bool) -> None:
        folder = self.volume / name
        (folder / ".complete").unlink(missing_ok=True)
        for path, raw in files.items():
            if not in_place:
                (folder / path).unlink(missing_ok=True)
            _write(folder / path, raw)
        temporary = folder / ".complete.tmp"
        with temporary.open("w") as file:
            json.dump(marker, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / ".complete")


def _write(path: Path, raw: bytes) -> None:
    """Overwrite a file. If the sidecar deletes the directory meanwhile, because the checkpoint is durable, write it again."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "wb") as file:
                file.write(raw)
                file.truncate()
                return


class Job:
    """Plays the story of a job."""

    def __init__(self, run: Run, stack: contextlib.ExitStack) -> None:
        self._run, self._stack = run, stack
        self._count = run.story.nodes
        self._made = 0
        self._attempt_id = ""
        self._step = 0
        self._newest: Version | None = None
        self._saved: set[str] = set()
        """By the present attempt."""
        self._earlier: list[tuple[Node, int, str]] = []
        self._nodes = [self._new_node(index) for index in range(self._count)]

    def play(self) -> None:
        for attempt in self._run.story.attempts:
            self._live(attempt)
        self._run.heal()
        healed_s = time.monotonic()
        self._live(LAST, healthy=True)
        for name in sorted(self._saved):
            self._until_durable(name, healed_s)
        self._end_earlier()  # after the last attempt: the pods that replaced them have begun by then
        self._end()
        self._run.check_store()
        self._resume_anew()

    def _new_node(self, index: int, count: int | None = None) -> Node:
        self._made += 1
        uid = f"node-{index}-{self._made}"
        volume = self._run.folder / uid
        volume.mkdir()
        proxy, way = self._stack.enter_context(self._run.way_of_its_own(self._made))
        its = {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": str(count or self._count)}
        node = Node(self._run, uid, volume, way | its, proxy)
        self._stack.callback(node.close)
        self._stack.callback(node.free_lease)
        return node

    def _live(self, attempt: Attempt, *, healthy: bool = False) -> None:
        """One attempt: all nodes resume the same step and save; it ends when a node is replaced."""
        time.sleep(1.1)  # ids of attempts begin with their second
        self._saved.clear()
        self._attempt_id = f"{utc('%Y%m%dT%H%M%SZ')}-{uuid.uuid4().hex[:6]}"
        self._run.note(f"attempt {self._attempt_id}: {[act.kind for act in attempt.acts]} {[t.kind for t in attempt.troubles]}")
        for node in self._nodes:
            if node.proxy is not None:
                node.proxy.begin(attempt.troubles)
            if not node.lives:
                node.start()
            node.hold_lease()
        self._resume(healthy=healthy)
        over = threading.Event()
        acting = threading.Thread(target=self._act_all, args=(attempt, over), daemon=True)
        acting.start()
        dice = random.Random(f"{self._run.story.seed} {len(self._run.notes)}")
        for save in attempt.saves:
            if over.wait(save.after_s):
                break
            self._save(save, dice, over)
        acting.join()
        for node in self._nodes:
            node.check_alive()

    def _resume(self, *, healthy: bool) -> None:
        before = self._run.newest()
        answer = self._nodes[0].ask("latest", within_s=RESUME_S)
        after = self._run.newest()
        self._run.note(f"node 0 resumes {answer['state']} {answer.get('checkpoint')} ({answer.get('source')}); newest {after}")
        if answer["state"] == "none" and before is not None and before == after:
            self._run.violation(f"a resume answered none, and {after} is committed")
        if answer["state"] != "ready":
            # An attempt that had begun without that commit may be writing its step anew.
            if healthy and before is not None and (before == after or self._run.published.count(before) < 2):
                self._run.violation(f"node 0 got {answer} without faults, and {before} is committed")
            self._step = 0
            return
        self._run.check_resumed(answer, self._nodes[0].volume, node=0, of=before if healthy and before == after else None)
        name, self._step = str(answer["checkpoint"]), int(answer["step"])
        for index, node in enumerate(self._nodes[1:], 1):
            its = node.ask(name, within_s=RESUME_S)
            if its["state"] == "ready" or healthy:
                self._run.check_resumed(its, node.volume, node=index, of=name)
            else:
                self._run.note(f"node {index} got {its['state']}: {its.get('detail')}")

    def _files(self, name: str, index: int, save: Save, writing: str) -> dict[str, bytes]:
        seed = f"{self._run.story.seed} {self._attempt_id} {name} {writing}"
        files = {f"__{index}_{number}.distcp": content(f"{seed} {index} {number}", s) for number, s in enumerate(save.sizes)}
        return files | {"config.json": content(seed, 900), "deep/rng.pth": content(f"{seed} {index}", 1_500)}

    def _save(self, save: Save, dice: random.Random, over: threading.Event) -> None:
        self._step += STEPS
        name = f"checkpoint-{self._step}"
        again = save.mishap.startswith("written again")
        for writing in ("first", "second") if again else ("first",):
            nodes = list(self._nodes)  # before the question: a pod that replaces one takes no part in this attempt
            if over.is_set():
                return
            parts = {index: self._files(name, index, save, writing) for index in range(self._count)}
            hashes: dict[int, Files] = {i: {path: content_of(raw) for path, raw in files.items()} for i, files in parts.items()}
            version = self._run.published.add(name, self._attempt_id, hashes)
            self._saved.add(name)
            marker = {"format": 1, "step": self._step, "attempt": self._attempt_id, "save_id": uuid.uuid4().hex}
            marker |= {"created_at": utc(), "world_size": self._count}
            for index, node in enumerate(nodes):
                time.sleep(dice.choice((0.0, 0.0, 0.1)))
                listed = [{"path": path, "size_bytes": len(raw)} for path, raw in parts[index].items()]
                node.write(name, parts[index], marker | {"files": listed}, in_place=save.mishap.endswith("in place"))
            self._newest = version
            time.sleep(dice.choice((0.0, 0.5)) if again else 0.0)

    def _act_all(self, attempt: Attempt, over: threading.Event) -> None:
        began_s = time.monotonic()
        for act in sorted(attempt.acts, key=lambda act: act.at_s):
            time.sleep(max(0.0, began_s + act.at_s - time.monotonic()))
            if act.kind in ENDS_ATTEMPT:
                over.set()
            self._act(act)
            if act.kind in ENDS_ATTEMPT:
                return

    def _act(self, act: NodeAct) -> None:
        node = self._nodes[act.node]
        if not act.kind:
            return
        self._run.faults[f"node: {act.kind}"] += 1
        self._run.note(f"{node.uid}: {act.kind}")
        if act.kind == "cut off" and node.proxy is not None:
            node.proxy.cut_off = True
            time.sleep(act.length_s)
            node.proxy.cut_off = False
        elif act.kind == "sidecar killed":
            node.kill()
            node.start()
        elif act.kind == "sidecar stopped" and node.lives:
            node.stop(act.length_s)
        elif act.kind == "pod lost":
            node.kill()
            node.free_lease()
            self._nodes[act.node] = self._new_node(act.node)
        elif act.kind == "replaced while it lives":
            self._replace(act)

    def _replace(self, act: NodeAct) -> None:
        """Start another pod for a node. The earlier one saves on, for the attempt that it knows.

        It saves new steps, after the one that all may be saving now. The part of one node is enough to replace the commit of an
        earlier attempt, or an earlier save of its own, so it would end that.
        """
        earlier, step, attempt = self._nodes[act.node], self._run.published.last_step(), self._attempt_id
        self._nodes[act.node] = self._new_node(act.node)
        self._earlier.append((earlier, act.node, attempt))

        def saves_on() -> None:
            for number in (2, 3):
                time.sleep(1.2)
                name = f"checkpoint-{step + STEPS * number}"
                files = {f"__{act.node}_0.distcp": content(f"{name} of a pod that was replaced", 9_000 + number)}
                marker = {"format": 1, "step": step + STEPS * number, "attempt": attempt, "created_at": utc()}
                with contextlib.suppress(OSError):
                    earlier.write(name, files, marker, in_place=False)

        threading.Thread(target=saves_on, daemon=True).start()

    def _end_earlier(self) -> None:
        for node, index, _ in self._earlier:
            node.free_lease()
            if index == 0:
                code = ends(node.sidecar, within_s=10.0 + node.grace_s + SLACK_S + 30)
                self._run.note(f"{node.uid}: exit code {code} as the earlier node 0")
                if code != 4:
                    self._run.violation(
                        f"{node.uid}: exit code {code} of a node 0 that was replaced: {node.sidecar.log()[-2500:]}"
                    )
            elif node.lives:
                node.terminate()
            node.close()

    def _until_durable(self, name: str, healed_s: float) -> None:
        """All that the last attempt saved becomes durable."""
        while True:
            commit = self._run.reader.commit(name)
            version = self._run.published.of_commit(commit) if commit is not None and commit.is_whole else None
            if version is not None and version.pod == self._attempt_id:
                break
            if commit is None and self._is_removed(name):
                break
            if time.monotonic() - healed_s > patience(HEALED_S):
                logs = [f"{node.uid}: {node.sidecar.log()[-1500:]}" for node in self._nodes]
                self._run.violation(f"{name} is not durable {HEALED_S} s after all faults ended: {logs}")
                return
            time.sleep(0.2)
        self._run.durable_after_s = time.monotonic() - healed_s
        self._run.note(f"{name} is durable {self._run.durable_after_s:.1f} s after all faults ended")

    def _is_whole(self, name: str) -> bool:
        commit = self._run.reader.commit(name)
        return commit is not None and commit.is_whole

    def _is_removed(self, name: str) -> bool:
        """Whether it may be superseded, or removed by retention, because a newer one is durable."""
        newest = self._newest
        return newest is not None and newest.name != name and self._run.is_committed(newest)

    def _end(self) -> None:
        for node in self._nodes:
            node.free_lease()
        for node in self._nodes:
            node.check_alive()
        for node in self._nodes:
            code = node.terminate()
            if code == EXIT_GIVEN_UP and all(
                map(self._is_whole, (each["checkpoint"] for each in node.sidecar.report["given_up"]))
            ):
                # Others committed its part while it was about to send it again, and the grace period ended first.
                self._run.figures["nodes that gave up what others had committed"] += 1
            elif code != EXIT_OK:
                self._run.violation(f"{node.uid}: exit code {code} on a healthy store: {node.sidecar.log()[-2500:]}")

    def _resume_anew(self) -> None:
        """A job of another number of nodes resumes the newest."""
        newest, count = self._run.newest(), self._run.story.nodes_at_resume
        fresh = [self._new_node(index, count) for index in range(count)]
        for node in fresh:
            node.start()
        for index, node in enumerate(fresh):
            answer = node.ask("latest" if index == 0 else str(newest), within_s=RESUME_S)
            self._run.note(f"{node.uid} of {count}: resumes {answer['state']} {answer.get('checkpoint')}")
            self._run.check_resumed(answer, node.volume, node=index, of=newest)
        for node in fresh:
            if (code := node.terminate()) != EXIT_OK:
                self._run.violation(f"{node.uid}: exit code {code} after a resume: {node.sidecar.log()[-1500:]}")


def play(run: Run) -> None:
    if run.witness is not None:
        run.witness.may_be_overwritten = True
    with contextlib.ExitStack() as stack:
        Job(run, stack).play()
