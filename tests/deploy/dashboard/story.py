"""Two and a half minutes of three training jobs: real sidecars, a moto server behind a proxy per job, trainers of files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import servers
from tests.api.training import Training, training
from tests.deploy.dashboard.prometheus import Prometheus
from tests.faults.bucket import NAME as BUCKET
from tests.faults.plan import Dice, Fault, Kind, nothing
from tests.faults.proxy import FaultProxy
from tests.ports import free_port
from tests.process.sidecar_process import Sidecar, sidecar

LENGTH_S = 150.0
CHECKPOINT_BYTES, PART_BYTES = 12 << 20, 5 << 20
LINK_BYTES_PER_S = 3e6
SLOW_BYTES_PER_S = 0.75e6
STEPS_PER_S, PLANNED_STEPS = 10, 2000
GRACE_S = 16


@dataclass
class Job:
    """A job of one pod at a time, and its way to the store."""

    name: str
    namespace: str
    every_s: float
    """Between two saves."""
    proxy: FaultProxy
    endpoint: str


@dataclass
class Pod:
    """A sidecar, and a trainer in a thread."""

    job: Job
    name: str
    sidecar: Sidecar
    stopping: threading.Event = field(default_factory=threading.Event)
    trainer: Future[None] | None = None

    def train(self, pace: float) -> None:
        """Resume, then train and save until told to stop; the last save is just in time."""
        answer = self.sidecar.resume()
        step = int(answer["checkpoint"].rpartition("-")[2]) if answer["state"] == "ready" else 0
        with training(self.sidecar.volume) as trainer:
            saved_s = time.monotonic()
            while not self.stopping.wait(0.5 * pace):
                step += STEPS_PER_S // 2
                trainer.at(step, total_steps=PLANNED_STEPS)
                if time.monotonic() - saved_s >= self.job.every_s * pace:
                    saved_s = time.monotonic()
                    self._save(trainer, pace, "periodic")
            trainer.at(step := step + 1, total_steps=PLANNED_STEPS)
            self._save(trainer, pace, "jit")
            trainer.at(step, total_steps=PLANNED_STEPS, state="preempted")

    def _save(self, trainer: Training, pace: float, reason: str) -> None:
        trainer.save(trainer.step, int(CHECKPOINT_BYTES * pace), reason=reason, took_s=2 * pace)


class Stage:
    """The jobs, and the Prometheus that sees them. ``pace``: 1 for the whole length, less for a faster story."""

    def __init__(self, prometheus: Prometheus, endpoint: str, folder: Path, *, pace: float) -> None:
        self._prometheus, self._endpoint, self._folder, self._pace = prometheus, endpoint, folder, pace
        self._began_s = time.monotonic()
        self._open = contextlib.ExitStack()
        self._trainers = ThreadPoolExecutor()
        self._pods: list[Pod] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[Stage]:
        """End what was started, after the context."""
        with self._open, self._trainers:
            try:
                yield self
            finally:
                for pod in self._pods:
                    pod.stopping.set()
            for pod in self._pods:
                if pod.trainer:
                    pod.trainer.result()

    def job(self, namespace: str, name: str, *, every_s: float) -> Job:
        proxy = FaultProxy(self._endpoint)
        endpoint = self._open.enter_context(proxy.running())
        proxy.bytes_per_s = LINK_BYTES_PER_S
        return Job(name, namespace, every_s, proxy, endpoint)

    def pod(self, job: Job, suffix: str) -> Pod:
        """Start a pod of a job on an empty volume."""
        name = f"{job.name}-{suffix}"
        settings = {
            "CKPT_STORE": f"s3://{BUCKET}/{job.name}",
            "AWS_S3_ENDPOINT": job.endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_DEFAULT_REGION": servers.REGION,
            "CKPT_METRICS_BIND": f"127.0.0.1:{(port := free_port())}",
            "CKPT_PART_SIZE": str(PART_BYTES),
            "CKPT_GRACE_SECONDS": str(GRACE_S),
            "POD_NAMESPACE": job.namespace,
            "JOB_NAME": job.name,
        }
        pod = Pod(job, name, self._open.enter_context(sidecar(self._folder / name, settings)))
        self._prometheus.add(job.namespace, name, port)
        pod.sidecar.ready()
        pod.trainer = self._trainers.submit(pod.train, self._pace)
        self._pods.append(pod)
        return pod

    def preempt(self, pod: Pod) -> None:
        """End a pod as kubelet does: preStop, the trainer's just-in-time save, then SIGTERM for the sidecar."""
        assert pod.trainer
        pod.sidecar.call("POST", "/v1/drain?source=prestop", {})
        pod.stopping.set()
        pod.trainer.result()
        pod.sidecar.terminate()
        self._prometheus.remove(pod.name)

    def begin(self) -> None:
        """Count the story's instants from now on."""
        self._began_s = time.monotonic()

    def at(self, instant_s: float) -> None:
        """Wait for an instant of the story."""
        time.sleep(max(0.0, self._began_s + instant_s * self._pace - time.monotonic()))


@contextlib.contextmanager
def play(prometheus: Prometheus, folder: Path, *, pace: float = 1.0) -> Iterator[tuple[float, float]]:
    """Play the story and yield its first and last instant (Unix seconds), while the last pods still run."""
    with servers.moto() as endpoint, Stage(prometheus, endpoint, folder, pace=pace).running() as stage:
        servers.create_bucket(endpoint, BUCKET)
        began_s = time.time()
        llama = stage.job("team-a", "llama", every_s=20)
        mistral = stage.job("team-a", "mistral", every_s=15)
        qwen = stage.job("team-b", "qwen", every_s=18)
        stage.pod(llama, "0")
        stage.pod(mistral, "0")
        first = stage.pod(qwen, "0-a")
        stage.begin()
        stage.at(45)
        stage.preempt(first)
        stage.at(60)
        stage.pod(qwen, "0-b")
        stage.at(65)
        mistral.proxy.plan = Dice(1, share=0.35, kinds=[Kind.SLOW_DOWN])
        stage.at(75)
        mistral.proxy.plan = lambda _: Fault(Kind.ERROR_500)
        stage.at(90)
        llama.proxy.bytes_per_s = SLOW_BYTES_PER_S
        stage.at(100)
        mistral.proxy.plan = nothing
        stage.at(LENGTH_S)
        yield began_s, time.time()
