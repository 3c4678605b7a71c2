"""A job of several nodes whose pods and nodes are taken away at moments that a seed chooses.

The reader of tests/campaign, which shares no code with the sidecar, checks the store when it is over.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from dataclasses import dataclass

from tests.campaign.reader import Reader, content_of, step_of
from tests.cluster.kubectl import Life, Object, kubectl, until
from tests.cluster.node_trainer import part
from tests.cluster.settings import ClusterSettings, call_for_node
from tests.cluster.story import Story
from tests.cluster.workloads import Workloads

KINDS = ("deleted", "deleted at once", "drained", "lost", "sidecar killed")
RESUMES_S = 90.0
_BEGAN = re.compile(r"^([\d.]+) attempt (\S+) resumes from (\d+)$")
_SAVED = re.compile(r"^([\d.]+) saved (\d+)$")


@dataclass(frozen=True)
class Act:
    """What befalls a node of the job."""

    kind: str
    node: int
    in_calm: bool
    """Whether it waits until all nodes train; else it may hit a restart, a resume or a flush."""
    after_s: float


@dataclass(frozen=True)
class Plan:
    """What a seed says."""

    seed: int
    nodes: int
    save_every: int
    size_kib: int
    acts: tuple[Act, ...]


def plan(seed: int, *, may_lose_nodes: bool) -> Plan:
    """Return the plan of a seed. Each kind of act is in it once, and some twice."""
    dice = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != "lost" or may_lose_nodes]
    kinds += dice.choices([kind for kind in kinds if kind != "lost"], k=2)
    dice.shuffle(kinds)
    nodes = dice.choice((2, 3))
    acts = tuple(Act(kind, dice.randrange(nodes), dice.random() < 0.6, round(dice.uniform(0.1, 4.0), 2)) for kind in kinds)
    return Plan(seed, nodes, dice.choice((4, 10)), dice.choice((64, 2048)), acts)


def stateful_set(workloads: Workloads, made: Plan) -> list[Object]:
    """Return the job: pods that are made anew at once, under their names."""
    environ = {"SEED": made.seed, "NODES": made.nodes, "MEET": "run-0.run", "SAVE_EVERY": made.save_every}
    pod = workloads.pod(["python3", "/scripts/node_trainer.py"], SIZE_KIB=made.size_kib, **environ)
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    pod["spec"]["containers"][0]["env"].append({"name": "NODE", "valueFrom": index})
    pod["spec"] |= {"restartPolicy": "Always", "shareProcessNamespace": True}  # the latter for a sidecar that is killed
    labels = {"app": "run"}
    pod["metadata"]["labels"] = labels
    spec = {
        "serviceName": "run",
        "replicas": made.nodes,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "run"}, "spec": service},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "run"}, "spec": spec | {"template": pod}},
    ]


class Campaign:
    """Plays one seed."""

    def __init__(self, story: Story, settings: ClusterSettings, reader: Reader, made: Plan) -> None:
        self._story, self._settings, self._reader, self._plan = story, settings, reader, made
        self._newest: list[tuple[float, int]] = []
        """When a step was first seen to be the newest whole one in the store."""
        self._acted_s = 0.0
        self._lost: list[str] = []
        self.notes: list[str] = []
        self._began_s = time.time()

    def play(self) -> None:
        documents = stateful_set(self._story.workloads, self._plan)
        try:
            self._story.start(*documents)
            for act in self._plan.acts:
                if act.in_calm or not self._acted_s:
                    self._attempt_after(self._acted_s)
                time.sleep(act.after_s)
                lost = bool(self._lost)
                self._act(act)
                if lost:
                    self._bring_back()
            self._attempt_after(self._acted_s)
        finally:
            self._bring_back()
        self._end(documents)
        self._check()

    def note(self, text: str) -> None:
        self.notes.append(f"{time.time() - self._began_s:6.1f} {text}")

    # --- what befalls the job

    def _act(self, act: Act) -> None:
        name = f"run-{act.node}"
        pod = self._story.namespace.watch.pods.get(name, {})
        node = pod.get("spec", {}).get("nodeName")
        if act.kind != "sidecar killed":  # after which training goes on
            self._acted_s = time.time()
        self.note(f"{act.kind}: {name} on {node}")
        if act.kind == "deleted":
            self._story.namespace.delete_pod(name, "--ignore-not-found")
        elif act.kind == "deleted at once":
            self._story.namespace.delete_pod(name, "--ignore-not-found", "--grace-period=1")
        elif act.kind == "sidecar killed":
            self._kill_sidecar(name)
        elif node is not None and act.kind == "drained" and not self._lost:
            self._drain(node)
        elif act.kind == "drained":  # to nowhere
            self._story.namespace.delete_pod(name, "--ignore-not-found")
        elif node is not None and act.kind == "lost":
            self._lose(node)

    def _kill_sidecar(self, pod: str) -> None:
        kill = (
            "import os, pathlib; [os.kill(int(p.parent.name), 9) for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')"
            " if b'checkpoint-sidecar\\0run' in p.read_bytes()]"
        )
        with contextlib.suppress(Exception):  # it has no such container at the moment
            self._story.namespace.kubectl("exec", pod, "-c", "trainer", "--", "python3", "-c", kill, timeout_s=20)

    def _drain(self, node: str) -> None:
        try:
            options = ["--pod-selector=app=run", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=60s"]
            kubectl("drain", node, *options)
        finally:
            kubectl("uncordon", node)

    def _on(self, node: str) -> list[str]:
        living = self._story.namespace.living()
        return [pod["metadata"]["name"] for pod in living if pod["spec"].get("nodeName") == node]

    def _lose(self, node: str) -> None:
        kubectl("cordon", node)
        self._lost.append(node)
        call_for_node(self._settings.lose_node, node)
        for pod in self._on(node):
            self._story.namespace.delete_pod(pod, "--force", "--grace-period=0", "--ignore-not-found")

    def _bring_back(self) -> None:
        while self._lost:
            node = self._lost.pop()
            self.note(f"{node} comes back")
            call_for_node(self._settings.restore_node, node)
            kubectl("uncordon", node)

    # --- what the job says

    def _trainers(self) -> list[Life]:
        return self._story.lives()

    def _attempts(self) -> list[tuple[float, str, int]]:
        """Return start, id and first step of each attempt that all nodes began, in their order."""
        found: dict[str, tuple[float, int, set[str]]] = {}
        for life in self._trainers():
            for match in filter(None, map(_BEGAN.match, list(life.lines))):
                at_s, step, pods = found.get(match[2], (float(match[1]), int(match[3]), set()))
                found[match[2]] = (min(at_s, float(match[1])), step, pods | {life.pod})
        whole = [(at_s, name, step) for name, (at_s, step, pods) in found.items() if len(pods) == self._plan.nodes]
        return sorted(whole)

    def _attempt_after(self, then_s: float) -> None:
        """Wait until all nodes train in an attempt that began later."""

        def began() -> bool:
            self._look()
            return any(at_s > then_s for at_s, _, _ in self._attempts())

        until(began, what=lambda: f"an attempt\n{self.report()}", timeout_s=RESUMES_S, every_s=0.4)

    def _look(self) -> None:
        names = [name for name in self._reader.names() if name != "final"]
        newest = max(map(step_of, names), default=0)
        if newest and newest > max((step for _, step in self._newest), default=0):
            self._newest.append((time.time(), newest))

    def report(self) -> str:
        return "\n".join([*map(str, self._plan.acts), *self.notes, self._story.namespace.watch.report()])

    # --- the end

    def _end(self, documents: list[Object]) -> None:
        """All pods are told to end; new ones resume the newest."""
        self.note("all deleted")
        told_s = time.time()
        self._story.namespace.kubectl("delete", "statefulset", "run", "--cascade=foreground", "--timeout=90s")
        newest = self._reader.newest_whole()
        assert newest is not None, self.report()
        self.note(f"newest: {newest.step}")
        self._story.start(*documents)
        self._attempt_after(told_s)
        assert self._attempts()[-1][2] == newest.step, self.report()
        self._story.namespace.kubectl("delete", "statefulset", "run", "--cascade=foreground", "--timeout=90s")

    def _check(self) -> None:
        committed = self._check_commits()
        for at_s, attempt, step in self._attempts():
            before = max((newest for seen_s, newest in self._newest if seen_s < at_s - 5), default=0)
            assert step >= before, f"{attempt} resumed {step}, and {before} was durable\n{self.report()}"
        for life in self._story.sidecars():
            for report in life.events("exit_report"):
                if report["exit_code"] == 0:
                    saved = max(self._saved_by(life.uid), default=0)
                    assert saved <= max(committed), f"{life.pod} ended with 0, {saved} is not durable\n{self.report()}"
        said = [line for life in list(self._story.namespace.watch.lives.values()) for line in life.lines]
        wrong = [line for line in said if "Traceback" in line or "WRONG RESUME" in line]
        assert not wrong, f"{wrong}\n{self.report()}"

    def _check_commits(self) -> list[int]:
        """Every committed checkpoint is whole, and each file is the one that its node writes at that step."""
        committed = []
        for name in self._reader.names():
            found = self._reader.commit(name)
            assert found is not None
            assert found.is_whole, f"{name}: {found.problems}\n{self.report()}"
            for node in range(self._plan.nodes):
                files = part(str(self._plan.seed), node, found.step, self._plan.size_kib << 10)
                wanted = {path: content_of(raw) for path, raw in files.items()}
                assert found.nodes.get(node) == wanted, f"{name}: node {node} has other files\n{self.report()}"
            committed.append(found.step)
        assert committed
        return committed

    def _saved_by(self, uid: str) -> list[int]:
        lines = [line for life in self._trainers() if life.uid == uid for line in life.lines]
        return [int(match[2]) for match in filter(None, map(_SAVED.match, lines))]


def seeds() -> range:
    """Return the seeds to play: ``CKPT_CLUSTER_SEEDS``, one or ``FIRST:AFTER``."""
    first, _, after = os.environ.get("CKPT_CLUSTER_SEEDS", "1").partition(":")
    return range(int(first), int(after or int(first) + 1))
