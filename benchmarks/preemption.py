"""The time line of one preemption on the cluster of KUBECONFIG, with the sidecar and without it.

A Job's pod is deleted while it trains; the table has the time of each event, in seconds from the deletion. Settings of the
cluster and of its store are those of the tests (tests/cluster/README.md). Medians; the clocks of machine and nodes must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import boto3

from tests.cluster.conftest import make_namespace, remove_namespace, until_gone
from tests.cluster.kubectl import SIDECAR, Life, Namespace, Object, until
from tests.cluster.settings import ClusterSettings, why_not
from tests.cluster.story import Story, steps
from tests.cluster.workloads import Workloads, scripts, secret

BARE_TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("starts after step 0", flush=True)
for step in range(1, 10_000):
    time.sleep(0.1)
    print(f"step {step}", flush=True)
"""
STARTED = """
import time
ticks = int(open("/proc/1/stat").read().rpartition(")")[2].split()[19])
print(time.time() - float(open("/proc/uptime").read().split()[0]) + ticks / 100)
"""
"""Prints when a container's first process started: what Kubernetes says of it are whole seconds."""
TrainJob = Callable[[Story], None]


def ours(story: Story) -> None:
    story.start(story.workloads.job(story.workloads.file_pod(STEPS=10_000, SAVE_EVERY=10_000, SIZE_MIB=64)))


def bare(story: Story) -> None:
    pod = story.workloads.pod(["python3", "-u", "-c", BARE_TRAINER])
    pod["spec"]["terminationGracePeriodSeconds"] = 60
    story.namespace.apply(story.workloads.job(pod))


def timeline(story: Story) -> dict[str, float]:
    """Delete the pod of a run that trains, and return the time of each event, in seconds from the deletion."""
    # Long after its start: the kubelet looks at a pod once a second, and first ends what it does for a start.
    first = story.at_step(60)
    told_s = time.time()
    story.namespace.delete_pod(first.pod)
    second = story.at_step(1, life=1)
    steps_at = [at for at, line in zip(second.at_s, second.lines, strict=False) if line.startswith("step ")]
    found = _of_sidecar(story, first.pod)
    found["trainer's last step"] = [at for at, line in zip(first.at_s, first.lines, strict=False) if line.startswith("step ")][
        -1
    ]
    until(lambda: first.pod in story.namespace.watch.gone_at_s, what="the pod is gone")
    found["pod gone"] = story.namespace.watch.gone_at_s[first.pod]
    found |= _of_pod(story.namespace, second)
    found["first step done"] = steps_at[0]
    assert steps(second)[0] in (1, steps(first)[-1] + 1)
    return {name: at - told_s for name, at in found.items()}


def _of_sidecar(story: Story, pod: str) -> dict[str, float]:
    lives = [life for life in story.sidecars() if life.pod == pod]
    names = {"notice": "termination_noticed", "saved": "checkpoint_finished", "durable": "checkpoint_committed"}
    found = {name: life.events(event)[-1 if name != "notice" else 0] for life in lives for name, event in names.items()}
    return {name: datetime.fromisoformat(event["timestamp"]).timestamp() for name, event in found.items()}


def _of_pod(namespace: Namespace, life: Life) -> dict[str, float]:
    """Return when the replacement was made, scheduled and started."""
    seen = [(at, pod) for at, _, pod in namespace.watch.changes if pod["metadata"]["name"] == life.pod]
    found = {
        "new pod": seen[0][0],
        "scheduled": next(at for at, pod in seen if pod["spec"].get("nodeName")),
    }
    of_sidecar = [each for each in namespace.watch.of(SIDECAR) if each.pod == life.pod and each.lines]
    if of_sidecar:
        said = namespace.kubectl("exec", life.pod, "-c", SIDECAR, "--", "python3", "-c", STARTED)
        found["sidecar's container started"] = float(said)
        found["sidecar says that it started"] = of_sidecar[0].at_s[0]
        found["sidecar ready"] = next(at for at, pod in seen if _status(pod).get("started"))
    found["resumed"] = next(at for at, line in zip(life.at_s, life.lines, strict=False) if line.startswith("starts after"))
    return found


def _status(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("initContainerStatuses", ())
    return next((each for each in statuses if each["name"] == SIDECAR), {})


def run(start: TrainJob, workloads: Workloads, bucket: Any) -> dict[str, float]:
    """Return the time line of one run, in a namespace of its own."""
    namespace = make_namespace("restricted")
    try:
        namespace.apply(secret(workloads.settings), scripts())
        story = Story(namespace, workloads, bucket)
        start(story)
        return timeline(story)
    finally:
        namespace.watch.close()
        remove_namespace(namespace.name)
        until_gone(namespace.name)
        bucket.objects.filter(Prefix=f"{namespace.name}/").delete()


def _to_step(line: dict[str, float]) -> float:
    return line["first step done"] - line["new pod"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    settings = ClusterSettings()
    access = {"aws_access_key_id": settings.access_key, "aws_secret_access_key": settings.secret_key}
    # The stubs want literal arguments.
    s3: Any = boto3.resource("s3", endpoint_url=settings.endpoint, region_name=settings.region, **access)  # type: ignore[call-overload]
    bucket = s3.Bucket(settings.bucket)
    if bucket.creation_date is None:
        bucket.create()
    rounds = [(run(ours, Workloads(settings), bucket), run(bare, Workloads(settings), bucket)) for _ in range(arguments.rounds)]
    medians = [
        {name: statistics.median(each[name] for each in lines) for name in lines[0]} for lines in zip(*rounds, strict=True)
    ]
    if arguments.json:
        print(json.dumps({"ours": medians[0], "bare": medians[1]}))
        return
    with_it, without = medians
    until_gone = with_it["pod gone"] - without["pod gone"]
    until_step = _to_step(with_it) - _to_step(without)
    ready = with_it["sidecar ready"] - with_it["sidecar's container started"]
    print(f"of it ours: {until_gone + until_step:.2f} s ({until_gone:.2f} until the pod is gone, {until_step:.2f} until its ")
    print(f"replacement's first step); sidecar ready {ready:.2f} s after its container started\n")
    print("| seconds from the deletion | with the sidecar | without |\n| --- | --- | --- |")
    for name in sorted(medians[0], key=medians[0].__getitem__):
        print(f"| {name} | {medians[0][name]:.2f} | {f'{medians[1][name]:.2f}' if name in medians[1] else ''} |")


if __name__ == "__main__":
    main()
