"""A store that does not answer while a pod is terminated: the state survives on a persistent volume."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Namespace, Object, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, assert_no_step_was_lost, steps
from tests.cluster.workloads import Workloads, named, secret

STEPS = 150
PORT = 9000
FORWARD = """
import asyncio, sys

async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def serve(reader, writer):
    try:
        back, out = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, out), copy(back, writer))

async def main():
    async with await asyncio.start_server(serve, port=int(sys.argv[3])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


class Store:
    """The way to the store for one namespace: a Service in front of a pod that forwards connections."""

    def __init__(self, namespace: Namespace, workloads: Workloads) -> None:
        self._namespace = namespace
        settings = workloads.settings
        found = urlsplit(settings.endpoint)
        pod = workloads.pod(
            ["python3", "-c", FORWARD, str(found.hostname), str(found.port or 80), str(PORT)], container="store"
        )
        labels = {"app": "store"}
        pod["metadata"]["labels"] = labels
        pod["spec"] |= {"restartPolicy": "Always", "terminationGracePeriodSeconds": 1}
        named(pod, "store")["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
        service = {"selector": labels, "ports": [{"port": PORT}]}
        deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        namespace.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "store"}, "spec": service},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "store"}, "spec": deployment},
            secret(replace(settings, endpoint=f"http://store.{namespace.name}.svc:{PORT}")),
        )
        self.comes_back()

    def goes_away(self) -> None:
        """Return when no connection to it is left."""
        self._namespace.kubectl("scale", "deployment", "store", "--replicas=0")
        until(lambda: not self._pods(), what="the store's pods are gone")

    def comes_back(self) -> None:
        self._namespace.kubectl("scale", "deployment", "store", "--replicas=1")
        self._namespace.kubectl("rollout", "status", "deployment", "store", "--timeout=90s")

    def _pods(self) -> list[str]:
        watch = self._namespace.watch
        return [name for name in list(watch.pods) if name.startswith("store-") and name not in watch.gone_at_s]


@pytest.fixture
def store(settings: ClusterSettings, namespace: Namespace, workloads: Workloads) -> Store:
    if not settings.endpoint.startswith("http://"):
        pytest.skip("CKPT_CLUSTER_S3_ENDPOINT is no http:// address, so connections to it cannot be forwarded")
    return Store(namespace, workloads)


def on_claim(pod: Object, claim: str) -> Object:
    """Return a pod template whose checkpoints are on a persistent volume."""
    pod["spec"]["volumes"].append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
    named(pod, "trainer")["volumeMounts"].append({"name": "work", "mountPath": "/checkpoints"})
    return pod


def test_a_store_that_is_away_for_the_whole_grace_period_costs_nothing_on_a_persistent_volume(
    story: Story, workloads: Workloads, shared_claim: str, store: Store
) -> None:
    story.start(workloads.job(on_claim(workloads.file_pod(STEPS=STEPS, STEP_S=0.2), shared_claim)), options=("--grace", "15"))
    first = story.at_step(25)
    story.durable(20)
    store.goes_away()
    committed = story.committed()
    story.namespace.delete_pod(first.pod)
    until(lambda: first.pod in story.namespace.watch.gone_at_s, what="the pod is gone")
    assert story.committed() == committed, "nothing was uploaded meanwhile"
    report = next(life for life in story.sidecars() if life.pod == first.pod).events("exit_report")[0]
    assert report["exit_code"] == 3, report
    assert report["given_up"], report
    # The next pod looks for the store for ten seconds, and then resumes from its volume.
    second = story.at_step(steps(first)[-1] + 1, life=1)
    assert second.pod != first.pod
    assert story.committed() == committed
    store.comes_back()
    assert story.weights() == weights_after(STEPS)
    assert_no_step_was_lost(*story.lives())
    story.completed()
    assert story.committed()[-1] == STEPS
