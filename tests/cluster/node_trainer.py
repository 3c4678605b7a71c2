"""A job of several nodes without PyTorch and without the hook: each node writes its part of each checkpoint, and its marker.

Node 0 is the meeting point, as with torchrun: it says what an attempt resumes from, and each step is done by all nodes or by
none. A node that is told to end has all of them save the same step; it leaves, and the others wait for its replacement. A node
that comes, or whose connection breaks, begins the next attempt.

Settings: NODE, NODES, MEET (host of node 0), SEED; optional STEP_S (seconds of a step), SAVE_EVERY (steps), SIZE_KIB (of a
part).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

PORT = 29400
PATIENCE_S = 15.0
STARTED_S = time.time()
VOLUME = Path(os.environ.get("CKPT_DIR", "/checkpoints"))


class Restart(Exception):
    """Another node is gone, or has come: the next attempt begins."""


class Left(Exception):
    """This node is told to end, or a later pod of its index is there."""


def part(seed: str, node: int, step: int, size_bytes: int) -> dict[str, bytes]:
    """Return the files of one node at one step, by path: the same in every attempt."""
    block = hashlib.sha256(f"{seed} {node} {step}".encode()).digest()
    return {f"__{node}_0.distcp": block * (size_bytes // len(block)), f"state-{node}.json": json.dumps({"step": step}).encode()}


class Peer:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(PATIENCE_S)
        self._stream = connection.makefile("rw", encoding="utf-8")

    def say(self, **said: Any) -> None:
        try:
            self._stream.write(json.dumps(said) + "\n")
            self._stream.flush()
        except OSError as error:
            raise Restart(f"a node is gone: {error}") from None

    def hear(self) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise Restart(f"a node is gone: {error}") from None
        if not line:
            raise Restart("a node is gone")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def close(self) -> None:
        for closing in (self._stream, self.connection):
            with contextlib.suppress(OSError):
                closing.close()


class Node:
    """One node; this process."""

    def __init__(self) -> None:
        self.index, self.count = int(os.environ["NODE"]), int(os.environ["NODES"])
        self.seed = os.environ["SEED"]
        self.step_s, self.save_every = float(os.environ.get("STEP_S", "0.2")), int(os.environ.get("SAVE_EVERY", "10"))
        self.size_bytes = int(os.environ.get("SIZE_KIB", "256")) << 10
        self._told = False
        self._listening: socket.socket | None = None
        self._last_attempt_s = 0.0
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        self._told = True

    def is_told(self) -> bool:
        return self._told or (VOLUME / ".ckpt/terminating").exists()

    def run(self) -> None:
        if self.index == 0:
            self._listening = socket.create_server(("", PORT))
        while True:
            peers: list[Peer] = []
            try:
                self._live(peers)
            except Restart as why:
                say(f"the attempt ends: {why}")
                # Two nodes that come back in step would end each other's attempts for ever.
                time.sleep(random.uniform(0.2, 2.0))
            except Left as why:
                say(f"leaves: {why}")
                sys.exit(143)
            finally:
                for peer in peers:
                    peer.close()

    def _live(self, peers: list[Peer]) -> None:
        """One attempt. ``peers``: gets the connections, node 0's to all others, and theirs to node 0."""
        if self.index == 0:
            attempt, resume = self._gather(peers)
        else:
            attempt, resume = self._join(peers)
        step = int(resume.removeprefix("checkpoint-")) if resume else 0
        self._check(resume, step)
        self._together(peers, stop=False)
        say(f"attempt {attempt} resumes from {step}")
        while True:
            time.sleep(self.step_s)
            step += 1
            stop = self._together(peers, stop=self.is_told())
            if stop or step % self.save_every == 0:
                self._save(step, attempt, "jit" if stop else "periodic")
            if stop and self.is_told():
                raise Left(f"after step {step}")
            if stop:
                raise Restart(f"after step {step}")

    def _gather(self, peers: list[Peer]) -> tuple[str, str | None]:
        """Wait for all others; ask for the newest checkpoint; tell them. Returns attempt and checkpoint."""
        found: dict[int, list[tuple[float, Peer]]] = {}
        while len(found) < self.count - 1:
            peer = self._newcomer(1.0)
            if self.is_told():
                raise Left("before an attempt")
            if peer is None:
                continue
            peers.append(peer)
            try:
                heard = peer.hear()
            except Restart:
                continue
            both = sorted([(heard["started_s"], peer), *found.get(heard["node"], [])], key=lambda each: float(each[0]))
            found[heard["node"]] = both[-1:]
            for started_s, older in both[:-1]:
                if started_s != both[-1][0]:
                    older.say(left=True)
        name = self._resume("latest")
        time.sleep(max(0.0, self._last_attempt_s + 1.1 - time.time()))  # ids begin with their second
        self._last_attempt_s = time.time()
        attempt = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
        peers[:] = [peer for [(_, peer)] in found.values()]
        for peer in peers:
            peer.say(attempt=attempt, resume=name)
        return attempt, name

    def _join(self, peers: list[Peer]) -> tuple[str, str | None]:
        while True:
            if self.is_told():
                raise Left("before an attempt")
            try:
                peer = Peer(socket.create_connection((os.environ["MEET"], PORT), timeout=2))
                break
            except OSError:  # no node 0 at the moment, or its name
                time.sleep(0.3)
        peers.append(peer)
        peer.say(node=self.index, started_s=STARTED_S)
        while not select.select([peer.connection], [], [], 0.5)[0]:
            if self.is_told():
                raise Left("before an attempt")
        heard = peer.hear()
        if heard.get("left"):
            raise Left("a later pod has its place")
        if heard["resume"] is not None and self._resume(heard["resume"]) is None:
            raise Restart(f"{heard['resume']} is not to be had")
        return heard["attempt"], heard["resume"]

    def _newcomer(self, within_s: float) -> Peer | None:
        assert self._listening is not None
        if not select.select([self._listening], [], [], within_s)[0]:
            return None
        return Peer(self._listening.accept()[0])

    def _together(self, peers: list[Peer], *, stop: bool) -> bool:
        """Return whether any node stops; it has the same answer on all nodes."""
        if self.index > 0:
            peers[0].say(stop=stop)
            return bool(peers[0].hear()["stop"])
        if (peer := self._newcomer(0)) is not None:
            peer.close()  # it comes again
            raise Restart("a node has come")
        stop = any([stop, *(peer.hear()["stop"] for peer in peers)])
        for peer in peers:
            peer.say(stop=stop)
        return stop

    def _resume(self, name: str) -> str | None:
        """Return the name of the checkpoint that is on the volume now; ``None``: there is none."""
        asked = None
        while True:
            if self.is_told():
                raise Left("before an attempt")
            try:
                if asked is None:
                    asked = _call("POST", "/v1/resume", {"checkpoint": name, "asked_by": "trainer"})["id"]
                answer = _call("GET", f"/v1/resume/{asked}?wait_s=1")
            except (OSError, ValueError, KeyError):
                asked = None
                time.sleep(0.2)
                continue
            if answer["state"] in ("ready", "none", "failed"):
                say(f"resume: {answer['state']} {answer.get('checkpoint')} ({answer.get('source')}) {answer.get('detail')}")
                if answer["state"] == "failed" and name == "latest":
                    raise Restart("the resume failed")
                return str(answer["checkpoint"]) if answer["state"] == "ready" else None

    def _check(self, resume: str | None, step: int) -> None:
        for path, raw in part(self.seed, self.index, step, self.size_bytes).items() if resume else ():
            if (VOLUME / str(resume) / path).read_bytes() != raw:
                say(f"WRONG RESUME: {resume}/{path}")
                sys.exit(7)

    def _save(self, step: int, attempt: str, reason: str) -> None:
        folder, files = VOLUME / f"checkpoint-{step}", part(self.seed, self.index, step, self.size_bytes)
        folder.mkdir(exist_ok=True)
        for path, raw in files.items():
            (folder / f"{path}.tmp").write_bytes(raw)
            (folder / f"{path}.tmp").rename(folder / path)
        marker = {"format": 1, "step": step, "attempt": attempt, "save_id": f"{attempt}-{step}", "reason": reason}
        marker |= {"created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "world_size": self.count}
        marker["files"] = [{"path": path, "size_bytes": len(raw)} for path, raw in files.items()]
        (folder / ".complete.tmp").write_text(json.dumps(marker))
        (folder / ".complete.tmp").rename(folder / ".complete")
        say(f"saved {step}")


def _call(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:9470{path}", method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
        request.add_header("x-checkpoint-sidecar", "tests")
    with urllib.request.urlopen(request, timeout=20) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def say(text: str) -> None:
    print(f"{time.time():.2f} {text}", flush=True)


def main() -> None:
    (VOLUME / ".ckpt/ranks").mkdir(parents=True, exist_ok=True)
    with (VOLUME / ".ckpt/ranks/0.lease").open("w") as lease:
        fcntl.lockf(lease, fcntl.LOCK_EX)
        Node().run()


if __name__ == "__main__":
    main()
