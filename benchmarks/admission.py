"""How long the API server of the cluster of KUBECONFIG waits for the webhook when 500 pods are created at once.

Three kinds of creation: a Job with that parallelism; one ``kubectl create``; eight of them beside each other. The pods ask for
a node that does not exist, so they do not start. Times are the API server's own (its metric of admission webhooks), which it
keeps in classes: the table has the share of reviews that took at most that many milliseconds. Settings as for the tests
(tests/cluster/README.md).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.conftest import make_namespace, remove_namespace
from tests.cluster.kubectl import Namespace, Object, kubectl, until
from tests.cluster.settings import ClusterSettings, why_not
from tests.cluster.test_webhook import ASKS, Webhook
from tests.cluster.workloads import Workloads

LIMITS_S = ("0.005", "0.025", "0.1", "0.5", "+Inf")
_METRIC = re.compile(r"^apiserver_admission_webhook_admission_duration_seconds_bucket\{(.*)\} (\S+)$", re.MULTILINE)
_NAME = 'name="inject.checkpoint-sidecar.example"'
Reviews = dict[str, int]


def reviews() -> Reviews:
    """Return the number of reviews up to now, by the longest time that they took."""
    found = dict.fromkeys(LIMITS_S, 0)
    for labels, count in _METRIC.findall(kubectl("get", "--raw", "/metrics")):
        limit = re.search(r'le="([^"]+)"', labels)
        if _NAME in labels and limit is not None and limit[1] in found:
            found[limit[1]] += int(float(count))
    return found


def waiting_pod(workloads: Workloads) -> Object:
    """Return a pod template that no node takes."""
    pod = workloads.file_pod(**{f"SETTING_{number}": "x" * 20 for number in range(20)})
    pod["metadata"] = ASKS
    pod["spec"]["nodeSelector"] = {"there-is": "none"}
    return pod


def by_job(namespace: Namespace, workloads: Workloads, pods: int) -> None:
    """Create the pods as the Job controller does."""
    namespace.apply(workloads.job(waiting_pod(workloads), parallelism=pods, completions=pods))
    until(lambda: len(namespace.watch.pods) >= pods, what="all pods", timeout_s=300)
    namespace.kubectl("delete", "job", "run", "--cascade=background")


def by_kubectl(namespace: Namespace, workloads: Workloads, pods: int, *, processes: int) -> None:
    """Create the pods by some ``kubectl create``."""
    spec = waiting_pod(workloads)["spec"]
    names = [f"pod-{index}" for index in range(pods)]
    items = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **ASKS}, "spec": spec} for name in names]
    lists = [json.dumps({"apiVersion": "v1", "kind": "List", "items": items[index::processes]}) for index in range(processes)]

    def create(given: str) -> str:
        return namespace.kubectl("create", "-f", "-", given=given, timeout_s=300)

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(create, lists))


CREATIONS: dict[str, Callable[[Namespace, Workloads, int], None]] = {
    "a Job": by_job,
    "kubectl create": lambda namespace, workloads, pods: by_kubectl(namespace, workloads, pods, processes=1),
    "eight of them": lambda namespace, workloads, pods: by_kubectl(namespace, workloads, pods, processes=8),
}


def measure(name: str, workloads: Workloads, pods: int, replicas: int) -> tuple[Reviews, float]:
    """Return the reviews of one kind of creation, and the seconds of all."""
    namespace = make_namespace("restricted")
    try:
        with tempfile.TemporaryDirectory() as folder:
            webhook = Webhook(Path(folder), workloads.settings, namespace)
            try:
                webhook.scale(replicas)
                time.sleep(3)  # until the service has all of them
                before, began_s = reviews(), time.monotonic()
                CREATIONS[name](namespace, workloads, pods)
                took_s, after = time.monotonic() - began_s, reviews()
            finally:
                webhook.remove()
        return {limit: after[limit] - before[limit] for limit in LIMITS_S}, took_s
    finally:
        namespace.watch.close()
        remove_namespace(namespace.name)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=2)
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    workloads = Workloads(ClusterSettings())
    limits = [f"{float(limit) * 1e3:g} ms" for limit in LIMITS_S[:-1]]
    print(f"| {given.pods} pods by | seconds | {' | '.join(limits)} |\n| --- | --- |{' --- |' * len(limits)}")
    for name in CREATIONS:
        found, took_s = measure(name, workloads, given.pods, given.replicas)
        shares = [f"{found[limit] / max(1, found['+Inf']):.1%}" for limit in LIMITS_S[:-1]]
        print(f"| {name} | {took_s:.1f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
