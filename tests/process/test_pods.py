"""A training run on two nodes: torchrun and a sidecar in each of two pods, and nothing that the pods share but the store."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.resume import newest_first
from tests.faults.plan import Fault, Kind
from tests.faults.proxy import FaultProxy
from tests.hook import story
from tests.hook.job import Training, finished, script, training
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, free_port, sidecar, until

STEPS = 14
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLD = {"args": {"max_steps": STEPS, "ddp_backend": "gloo"}, "rows": 128}
HERE = {"CKPT_GRACE_SECONDS": "60", "CKPT_RESUME": "on-demand"}  # eager downloads are through before the trainer asks
SAVES = {"CKPT_SAVE_STEPS": "5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}


class Pod:
    """One node: its volume, its sidecar, and the launcher of its ranks."""

    def __init__(self, running: Sidecar, launched: Training) -> None:
        self.sidecar = running
        self.trainer = launched

    def kill(self) -> None:
        """End everything at once, as a node that loses power."""
        for pid in (*self.trainer.children(), self.trainer.process.pid):  # torchrun's ranks have sessions of their own
            os.kill(pid, signal.SIGKILL)
        self.sidecar.kill()


@contextmanager
def pods(
    place: Place,
    volumes: list[Path],
    *,
    command: list[str] | None = None,
    sleep_s: float = 0.0,
    per_node: int = 2,
    endpoints: dict[int, str] | None = None,
) -> Iterator[list[Pod]]:
    """Run a job with one pod for each volume. ``endpoints``: where the sidecars of some nodes find the store."""
    rendezvous = f"--master_addr=127.0.0.1 --master_port={free_port()}".split()
    with ExitStack() as stack:
        running = []
        for index, volume in enumerate(volumes):
            node = {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": str(len(volumes))}
            if endpoints and index in endpoints:
                node["AWS_S3_ENDPOINT"] = endpoints[index]
            its = stack.enter_context(sidecar(volume, place.settings | node | HERE))
            nodes = [f"--nnodes={len(volumes)}", f"--node_rank={index}", f"--nproc_per_node={per_node}"]
            launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]
            ranks = [*launcher, *(command or script(**TOLD, sleep_s=sleep_s))[1:]]
            found = SAVES | {"CKPT_API_PORT": str(its.port)}
            running.append(Pod(its, stack.enter_context(training(ranks, volume, found))))
        yield running


def weights(output: str) -> str:
    return re.findall(r"weights (\w{64})", output)[-1]


def resumed_from(pod: Pod) -> int:
    return int(re.findall(r"resumes from checkpoint-(\d+)", pod.trainer.log())[0])


def asked_for(pod: Pod) -> dict[str, Any]:
    """The last download, which is the one that the trainer asked for."""
    return pod.sidecar.events("resume_download_started")[-1]


def patiently(pod: Pod) -> int:
    return pod.trainer.wait(timeout_s=150)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after all steps of a run that nothing happens to."""
    path = tmp_path_factory.mktemp("uninterrupted")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", f"--master_port={free_port()}"]
    with training([*command, "--master_addr=127.0.0.1", *script(**TOLD)[1:]], path / "volume", hooked=False) as alone:
        assert alone.wait(timeout_s=150) == 0, alone.log()
        return weights(alone.log())


@pytest.mark.parametrize("place", [pytest.param("rgw", marks=pytest.mark.rgw)], indirect=True)
def test_two_nodes_stop_at_one_step_when_one_is_preempted_and_go_on_with_the_same_weights(
    place: Place, tmp_path: Path, uninterrupted: str
) -> None:
    with pods(place, [tmp_path / "a0", tmp_path / "a1"], sleep_s=0.3) as (first, second):
        first.trainer.at_step(7)
        os.kill(second.trainer.process.pid, signal.SIGTERM)  # only one of the pods is told
        assert patiently(second) != 0
        assert patiently(first) != 0
        last = max(first.trainer.steps())
        jit = f"checkpoint-{last}"
        assert jit in finished(first.trainer.volume)
        assert jit in finished(second.trainer.volume)
        for pod in (first, second):
            pod.sidecar.committed(jit, timeout_s=60)
        # One pod comes back on its old volume, the other one on a new node.
    with pods(place, [tmp_path / "b0", tmp_path / "a1"]) as (first, second):
        assert patiently(first) == 0, first.trainer.log()
        assert patiently(second) == 0, second.trainer.log()
        assert resumed_from(first) == last
        assert weights(first.trainer.log()) == uninterrupted
        for pod in (first, second):  # the second one had its own files only
            assert asked_for(pod)["files_left_out"] == 2, "random states of the other node's ranks"


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_when_a_node_dies_the_newest_step_that_all_had_committed_is_resumed(
    place: Place, tmp_path: Path, uninterrupted: str
) -> None:
    with pods(place, [tmp_path / "a0", tmp_path / "a1"], sleep_s=1.0) as (first, second):
        for pod in (first, second):
            pod.sidecar.committed("checkpoint-5", timeout_s=120)
        first.trainer.at_step(8)
        second.kill()
        assert patiently(first) != 0, "the ranks of the other node end, too, within a bound"
    with pods(place, [tmp_path / "b0", tmp_path / "b1"]) as (first, second):
        for pod in (first, second):
            assert patiently(pod) == 0, pod.trainer.log()
        assert resumed_from(first) == 5
        assert weights(first.trainer.log()) == uninterrupted
        until(lambda: place.keys("final/.complete"))


def newest_committed(place: Place) -> str:
    return newest_first(stored.key.split("/")[0] for stored in place.store.list("") if stored.key.endswith("/.complete"))[0]


@pytest.mark.parametrize("place", [pytest.param("rgw", marks=pytest.mark.rgw)], indirect=True)
@pytest.mark.parametrize(("nodes", "per_node"), [(3, 1)])
def test_sharded_state_comes_back_after_all_pods_were_preempted_and_after_one_was_cut_off_from_the_store(
    place: Place, tmp_path: Path, nodes: int, per_node: int
) -> None:
    sharded = story.example("train_fsdp.py", "--epochs", "4")
    first, second, third = ([tmp_path / f"{life}{index}" for index in range(nodes)] for life in "abc")
    alone = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nodes * per_node}", "--master_addr=127.0.0.1"]
    alone += [f"--master_port={free_port()}", *sharded[1:]]
    with training(alone, tmp_path / "alone", {"CKPT_DIR": ""}, hooked=False) as uninterrupted:
        with pods(place, first, command=[*sharded, *story.SLOWLY], per_node=per_node) as running:
            running[0].trainer.said("step 3 ", timeout_s=150)
            for pod in running:
                os.kill(pod.trainer.process.pid, signal.SIGTERM)
            assert all(patiently(pod) != 0 for pod in running)
            jit = finished(first[0])[-1]
            for pod in running:
                pod.sidecar.committed(jit)
        uninterrupted.wait(timeout_s=150)  # gloo may abort once all is done: the weights tell
    proxy = FaultProxy(place.settings["AWS_S3_ENDPOINT"])
    with proxy.running() as endpoint:
        settings = {"command": [*sharded, *story.SLOWLY], "per_node": per_node, "endpoints": {nodes - 1: endpoint}}
        with pods(place, second, **settings) as running:
            running[0].trainer.said(f"resumes from {jit} ", timeout_s=150)
            until(lambda: newest_committed(place) != jit)
            proxy.plan = lambda request: Fault(Kind.RESET_BEFORE)
            committed = newest_committed(place)
            until(lambda: finished(second[0])[-1] not in (jit, committed))
            for pod in running:
                pod.kill()
    with pods(place, third, command=sharded, per_node=per_node) as running:
        committed = newest_committed(place)
        for pod in running:
            patiently(pod)
        assert f"resumes from {committed} " in running[0].trainer.log()
        assert asked_for(running[-1])["files_left_out"] > 0, "shards and places in the data of the other nodes' ranks"
        assert story.weights(running[0].trainer) == story.weights(uninterrupted)
