"""kubectl, and a namespace of a cluster: what is in it, what happens to its pods, and what they say."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

PATIENCE_S = 90.0
SIDECAR = "checkpoint-sidecar"
Object = dict[str, Any]
Found = TypeVar("Found")


class Refused(Exception):
    """A command of kubectl failed; the text is what it said."""


def kubectl(*arguments: str, given: str | None = None, timeout_s: float = PATIENCE_S) -> str:
    """Return what kubectl printed.

    Raises:
        Refused: Its exit code is not 0.
    """
    done = subprocess.run(
        ["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=timeout_s, errors="replace"
    )
    if done.returncode:
        raise Refused(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def until(
    look: Callable[[], Found], *, what: str | Callable[[], str], timeout_s: float = PATIENCE_S, every_s: float = 0.1
) -> Found:
    """Return the first true value of ``look``."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(every_s)
    return found


def apply(*documents: Object, namespace: str | None = None) -> None:
    where = ["-n", namespace] if namespace else []
    kubectl("apply", *where, "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


@dataclass
class Life:
    """One life of one container: what it said, up to now."""

    pod: str
    container: str
    restart: int
    uid: str = ""
    """The pod's: a StatefulSet gives the same name to the next one."""
    lines: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """When each line was said, by the clock of its node."""

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def events(self, event: str) -> list[Object]:
        """Return the log lines of a sidecar with this event."""
        return [found for line in self.lines if f'"{event}"' in line and (found := _parsed(line)).get("event") == event]


def _seconds(timestamp: str) -> float:
    try:
        return datetime.fromisoformat(timestamp[:26].rstrip("Z") + "+00:00").timestamp()
    except ValueError:
        return 0.0


def _parsed(line: str) -> Object:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Watch:
    """Follows all pods of a namespace and the output of all their containers, also of those that are gone by now."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.pods: dict[str, Object] = {}
        """By name, as last seen; pods that are gone stay."""
        self.gone_at_s: dict[str, float] = {}
        self.changes: list[tuple[float, str, Object]] = []
        """Seconds (this machine's clock), ADDED, MODIFIED or DELETED, and the pod."""
        self.lives: dict[tuple[str, str, int], Life] = {}
        """By the pod's UID, container and restart."""
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._follow_pods)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _start(self, follow: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=follow, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def of(self, container: str) -> list[Life]:
        """Return the lives of all containers of this name, in the order of their start."""
        return [life for life in list(self.lives.values()) if life.container == container]

    def report(self) -> str:
        """Return what everything said, for the one who reads why a test failed."""
        told = [f"{name}: {_summary(pod)}{' (gone)' if name in self.gone_at_s else ''}" for name, pod in self.pods.items()]
        for life in self.lives.values():
            told += [f"--- {life.pod} {life.container} {life.restart or ''}", *life.lines[:15]]
            told += ["[…]", *life.lines[-40:]] if len(life.lines) > 55 else life.lines[15:]
        return "\n".join(told)

    def _follow_pods(self) -> None:
        while not self._closed:
            command = ["get", "pods", "--watch", "--output-watch-events", "-o", "json"]
            with self._run(*command) as output:
                for line in output:
                    if line.endswith("\n"):  # else it was cut at the end
                        event = json.loads(line)
                        self._seen(event["type"], event["object"])
            time.sleep(0.2)

    def _seen(self, kind: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self.pods[name] = pod
        self.changes.append((time.time(), kind, pod))
        if kind == "DELETED":
            self.gone_at_s[name] = time.time()
        elif kind == "ADDED":
            self.gone_at_s.pop(name, None)
        status = pod.get("status", {})
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            restart = container["restartCount"]
            # A container that waits for its restart has ended: with its count, there is nothing more to follow.
            if "waiting" not in container["state"]:
                self._follow(Life(name, container["name"], restart, pod["metadata"]["uid"]))

    def _follow(self, life: Life) -> None:
        key = (life.uid, life.container, life.restart)
        if key not in self.lives:
            self.lives[key] = life
            self._start(self._read_log, life)

    def _read_log(self, life: Life) -> None:
        for _ in range(20):
            with self._run("logs", "--follow", "--timestamps", life.pod, "-c", life.container) as output:
                for line in output:
                    at, _, said = line.rstrip("\n").partition(" ")
                    life.at_s.append(_seconds(at))
                    life.lines.append(said)
            if life.lines or self._closed:
                return
            time.sleep(0.2)

    @contextlib.contextmanager
    def _run(self, *arguments: str) -> Iterator[Iterable[str]]:
        """Yield the lines that kubectl prints; none once this is closed."""
        with self._lock:
            process = None if self._closed else self._started(*arguments)
        if process is None:
            yield ()
            return
        with process:
            assert process.stdout is not None
            yield process.stdout
        with self._lock:
            self._running.remove(process)

    def _started(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["kubectl", "-n", self._namespace, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self._running.add(process)
        return process


def _summary(pod: Object) -> str:
    status = pod.get("status", {})
    states = [
        f"{found['name']}:{found['restartCount']}:{json.dumps(found['state'])[:200]}"
        for found in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    ]
    return " ".join([pod["spec"].get("nodeName", "-"), status.get("phase", "-"), status.get("reason", ""), *states])


class Namespace:
    """A namespace that a test has for itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.watch = Watch(name)

    def kubectl(self, *arguments: str, given: str | None = None, timeout_s: float = PATIENCE_S) -> str:
        return kubectl("-n", self.name, *arguments, given=given, timeout_s=timeout_s)

    def apply(self, *documents: Object) -> None:
        apply(*documents, namespace=self.name)

    def get(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def condition(self, kind: str, name: str) -> list[str]:
        """Return the conditions of an object that are true."""
        conditions = self.get(kind, name).get("status", {}).get("conditions", ())
        return [found["type"] for found in conditions if found["status"] == "True"]

    def events(self, reason: str) -> list[Object]:
        found = json.loads(self.kubectl("get", "events", f"--field-selector=reason={reason}", "-o", "json"))
        items: list[Object] = found["items"]
        return items

    def delete_pod(self, name: str, *options: str) -> None:
        self.kubectl("delete", "pod", name, "--wait=false", *options)

    def living(self) -> list[Object]:
        """Return the pods that exist and are not terminating."""
        there = (pod for name, pod in list(self.watch.pods.items()) if name not in self.watch.gone_at_s)
        return [pod for pod in there if "deletionTimestamp" not in pod["metadata"]]
