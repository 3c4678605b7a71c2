"""A training run on two nodes: torchrun and a sidecar in each of two pods, and nothing that the pods share but the store."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hook.job import Training, finished, script, training
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, free_port, sidecar, until

STEPS = 14
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLD = {"args": {"max_steps": STEPS, "ddp_backend": "gloo"}, "rows": 128}
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
def pods(place: Place, volumes: list[Path], *, sleep_s: float = 0.0, per_node: int = 2) -> Iterator[list[Pod]]:
    """Run a job with one pod for each volume."""
    rendezvous = f"--master_addr=127.0.0.1 --master_port={free_port()}".split()
    with ExitStack() as stack:
        running = []
        for index, volume in enumerate(volumes):
            node = {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": str(len(volumes))}
            its = stack.enter_context(sidecar(volume, place.settings | node | {"CKPT_GRACE_SECONDS": "60"}))
            nodes = [f"--nnodes={len(volumes)}", f"--node_rank={index}", f"--nproc_per_node={per_node}"]
            launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]
            command = [*launcher, *script(**TOLD, sleep_s=sleep_s)[1:]]
            found = SAVES | {"CKPT_API_PORT": str(its.port)}
            running.append(Pod(its, stack.enter_context(training(command, volume, found))))
        yield running


def weights(output: str) -> str:
    return re.findall(r"weights (\w{64})", output)[-1]


def resumed_from(pod: Pod) -> int:
    return int(re.findall(r"resumes from checkpoint-(\d+)", pod.trainer.log())[0])


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
            assert pod.sidecar.events("resume_download_started")


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
