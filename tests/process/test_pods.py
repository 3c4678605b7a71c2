"""A training run on two nodes: torchrun and a sidecar in each of two pods, and nothing that the pods share but the store."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.commit.resume import newest_first
from tests.faults.proxy import FaultProxy
from tests.hook import story
from tests.hook.job import ROOT, Training, finished, marker, script, training, warm_ranks
from tests.hook.loops.test_loops import DEEPSPEED
from tests.network import Host, Network
from tests.ports import free_port
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, sidecar, until
from tests.servers import REAL_STORES

STEPS = 14
pytestmark = [pytest.mark.slow, pytest.mark.crowded, pytest.mark.timeout(400)]
TOLD = {"args": {"max_steps": STEPS, "ddp_backend": "gloo"}, "rows": 128}
HERE = {"CKPT_GRACE_SECONDS": "60", "CKPT_RESUME": "on-demand"}  # eager downloads are through before the trainer asks
SAVES = {"CKPT_SAVE_STEPS": "5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
# Each of these stories on one of the servers, as all of its processes train: other tests show in what the servers differ.
ON_RGW, ON_MINIO = (pytest.mark.parametrize("place", [server], indirect=True) for server in REAL_STORES)


class Pod:
    """One node: its volume, its sidecar, the launcher of its ranks, and its network."""

    def __init__(self, running: Sidecar, launched: Training, host: Host | None) -> None:
        self.sidecar = running
        self.trainer = launched
        self.host = host

    def told_to_go(self) -> None:
        """The first thing that the kubelet does."""
        os.kill(self.trainer.process.pid, signal.SIGTERM)

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
    network: Network | None = None,
    command: list[str] | None = None,
    sleep_s: float = 0.0,
    per_node: int = 2,
    settings: dict[str, str] | None = None,
) -> Iterator[list[Pod]]:
    """Run a job with one pod for each volume, each in a network namespace of its own where there is a network."""
    hosts = [network.host() if network else None for _ in volumes]
    first = hosts[0].address if hosts[0] else "127.0.0.1"
    rendezvous = f"--master_addr={first} --master_port={free_port()}".split()
    with ExitStack() as stack:
        store, running = dict(place.settings), []
        if network:
            proxy = FaultProxy(store["AWS_S3_ENDPOINT"])
            store["AWS_S3_ENDPOINT"] = stack.enter_context(proxy.running(network.store_address))
        for index, (volume, host) in enumerate(zip(volumes, hosts, strict=True)):
            within = host.within if host else []
            node = {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": str(len(volumes))}
            its = stack.enter_context(sidecar(volume, store | node | HERE, within=within))
            nodes = [f"--nnodes={len(volumes)}", f"--node_rank={index}", f"--nproc_per_node={per_node}"]
            launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]
            ranks = [*launcher, *(command or script(**TOLD, sleep_s=sleep_s))[1:]]
            found = SAVES | warm_ranks() | {"CKPT_API_PORT": str(its.port)} | (settings or {})
            found |= {"GLOO_SOCKET_IFNAME": "eth0"} if host else {}
            running.append(Pod(its, stack.enter_context(training(ranks, volume, found, within=within)), host))
        yield running


@contextmanager
def alone(command: list[str], volume: Path, *, ranks: int, settings: dict[str, str] | None = None) -> Iterator[Training]:
    """Run it in one go, without the hook."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_addr=127.0.0.1"]
    whole = [*launcher, f"--master_port={free_port()}", *command[1:]]
    with training(whole, volume, warm_ranks() | {"CKPT_DIR": ""} | (settings or {}), hooked=False) as running:
        yield running


def weights(run: Training) -> str:
    return re.findall(r"weights (?:sha256 )?(\w{64})", run.log())[-1]


def resumed_from(pod: Pod) -> int:
    return int(re.findall(r"resumes from checkpoint-(\d+)", pod.trainer.log())[0])


def asked_for(pod: Pod) -> dict[str, Any]:
    """The last download, which is the one that the trainer asked for."""
    return pod.sidecar.events("resume_download_started")[-1]


def patiently(pod: Pod) -> int:
    return pod.trainer.wait(timeout_s=150)


def saved_just_in_time(running: list[Pod]) -> int:
    """Return the step at which all stopped, once it is durable for all."""
    for pod in running:
        assert patiently(pod) != 0
    steps = {int(finished(pod.trainer.volume)[-1].split("-")[1]) for pod in running}
    assert len(steps) == 1
    [step] = steps
    for pod in running:
        reason = marker(pod.trainer.volume, f"checkpoint-{step}")["reason"]
        assert reason == "jit" or step % 5 == 0, "or the ranks agreed in the periodic save"
        pod.sidecar.committed(f"checkpoint-{step}")
    return step


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after all steps of a run that nothing happens to, made once for all processes that run tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "uninterrupted").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        if not (digest := known.read()):
            with alone(script(**TOLD), tmp_path_factory.mktemp("alone") / "volume", ranks=4) as running:
                running.wait(timeout_s=150)  # gloo aborts now and then when all is done: the weights are what counts
                digest = weights(running)
            known.write(digest)
    return digest


@ON_RGW
def test_two_nodes_stop_at_one_step_when_one_is_preempted_or_both_and_go_on_with_the_same_weights(
    place: Place, network: Network, tmp_path: Path, uninterrupted: str
) -> None:
    with pods(place, [tmp_path / "a0", tmp_path / "a1"], network=network, sleep_s=0.3) as (first, second):
        first.trainer.at_step(3)
        second.told_to_go()  # only one of the pods is told
        jit = saved_just_in_time([first, second])
    # One pod comes back on its old volume, the other one on a new node.
    with pods(place, [tmp_path / "b0", tmp_path / "a1"], network=network, sleep_s=0.3) as (first, second):
        first.trainer.at_step(jit + 3)
        assert resumed_from(first) == jit
        for pod in (first, second):
            assert asked_for(pod)["files_left_out"] == 4, "random states and the epoch's start of the other node's ranks"
            pod.told_to_go()
        again = saved_just_in_time([first, second])
        assert jit < again < STEPS
    with pods(place, [tmp_path / "c0", tmp_path / "c1"], network=network) as (first, second):
        for pod in (first, second):
            assert patiently(pod) == 0, pod.trainer.log()
        assert resumed_from(first) == again
        assert weights(first.trainer) == uninterrupted


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
        assert weights(first.trainer) == uninterrupted
        until(lambda: place.keys("final/.complete"))


def newest_committed(place: Place) -> str:
    return newest_first(stored.key.split("/")[0] for stored in place.store.list("") if stored.key.endswith("/.complete"))[0]


@ON_MINIO
def test_sharded_state_comes_back_after_all_pods_were_preempted_and_after_one_was_cut_off_from_the_store(
    place: Place, network: Network, tmp_path: Path
) -> None:
    nodes = 3
    sharded = story.example("train_fsdp.py", "--epochs", "4")
    job: dict[str, Any] = {"network": network, "per_node": 1}
    first, second, third = ([tmp_path / f"{life}{index}" for index in range(nodes)] for life in "abc")
    with alone(sharded, tmp_path / "alone", ranks=nodes) as whole:
        with pods(place, first, **job, command=[*sharded, *story.SLOWLY]) as running:
            running[0].trainer.said("step 3 ", timeout_s=150)
            for pod in running:
                pod.told_to_go()
            jit = saved_just_in_time(running)
        whole.wait(timeout_s=150)  # gloo may abort once all is done: the weights tell
    with pods(place, second, **job, command=[*sharded, *story.SLOWLY]) as running:
        running[0].trainer.said(f"resumes from checkpoint-{jit} ", timeout_s=150)
        until(lambda: newest_committed(place) != f"checkpoint-{jit}")
        cut_off = running[-1]
        assert cut_off.host is not None
        cut_off.host.pull_store_cable()
        committed = newest_committed(place)
        # Training goes on, and saves what cannot become durable any more.
        until(lambda: finished(second[0])[-1] not in (f"checkpoint-{jit}", committed))
        for pod in running:
            pod.kill()
    with pods(place, third, **job, command=sharded) as running:
        committed = newest_committed(place)
        for pod in running:
            patiently(pod)
        assert f"resumes from {committed} " in running[0].trainer.log()
        assert asked_for(running[-1])["files_left_out"] > 0, "shards and places in the data of the other nodes' ranks"
        assert weights(running[0].trainer) == weights(whole)


@dataclass(frozen=True)
class Engine:
    """What shards the state over the ranks of two nodes."""

    command: list[str]
    slowly: list[str]
    shards: frozenset[str]
    """Files that are in the store in the end, of both nodes."""
    left_out: int
    """How many files a node of a job of the same shape does without."""
    settings: dict[str, str] = field(default_factory=dict)


TRAINER = TOLD | {"fsdp": True}
ENGINES = {
    # Its shards are saved without dedup_save_to_lowest_rank, so everybody needs all of them.
    "accelerate": Engine(
        script(**TRAINER),
        script(**TRAINER, sleep_s=0.3),
        frozenset(f"{of}_0/__{rank}_0.distcp" for of in ("pytorch_model_fsdp", "optimizer") for rank in (0, 1)),
        left_out=2,
    ),
    "deepspeed": Engine(
        story.example("train_deepspeed.py", "--epochs", "1"),
        story.example("train_deepspeed.py", "--epochs", "1", *story.SLOWLY),
        frozenset(f"deepspeed/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)),
        left_out=2,
        settings={"PYTHONPATH": f"{ROOT}:{DEEPSPEED}"},
    ),
}
NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None and not (DEEPSPEED / "deepspeed").is_dir()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param("rgw", "accelerate", marks=pytest.mark.rgw),
        pytest.param(
            "minio",
            "deepspeed",
            marks=[pytest.mark.minio, pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed")],
        ),
    ],
    indirect=["place"],
)
def test_what_a_library_shards_over_two_nodes_comes_back_on_two_others(
    place: Place, network: Network, tmp_path: Path, name: str
) -> None:
    engine = ENGINES[name]
    job: dict[str, Any] = {"network": network, "per_node": 1, "settings": engine.settings}
    with alone(engine.command, tmp_path / "alone", ranks=2, settings=engine.settings) as whole:
        with pods(place, [tmp_path / "a0", tmp_path / "a1"], **job, command=engine.slowly) as (first, second):
            first.trainer.said("step 3", timeout_s=150)
            second.told_to_go()
            jit = saved_just_in_time([first, second])
        whole.wait(timeout_s=150)  # gloo may abort once all is done: the weights tell
    there = {key.removeprefix(f"checkpoint-{jit}/") for key in place.keys(f"checkpoint-{jit}/")}
    assert engine.shards <= there
    with pods(place, [tmp_path / "b0", tmp_path / "b1"], **job, command=engine.command) as (first, second):
        for pod in (first, second):
            patiently(pod)
            assert asked_for(pod)["files_left_out"] == engine.left_out
        assert resumed_from(first) == jit
        assert weights(first.trainer) == weights(whole)
