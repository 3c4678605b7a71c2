"""``make compose-demo``: the demo's acts in containers, under Docker Compose. Standard library only.

A pod is three containers that share a network and a volume (deploy/compose/compose.yaml). It is ended as a kubelet does it:
with a native sidecar, the trainer before the sidecar; with a classic one, both at once.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.outcome import Outcome, digest_in, judge, show
from examples.demo.pod import Process, SidecarLog, at_s
from examples.demo.timeline import Timeline, complain

FOLDER = Path("deploy/compose")
PATIENCE_S = 180.0
BUILD_S = 3600.0
SAVE_STEPS, MAX_STEPS = 20, 80
_LABEL = "com.docker.compose"


@dataclass(frozen=True, slots=True)
class Variant:
    """How a pod is run and ended."""

    order: str = "native"
    """``native``: SIGTERM to the trainer, and to the sidecar when that has ended. ``classic``: to both at once."""
    sidecar_user: str = ""
    """``UID:GID``; empty: the image's own."""
    trainer_user: str = ""
    run: str = "run-1"
    """Prefix in the bucket."""

    def settings(self) -> dict[str, str]:
        """Return the variables of compose.yaml."""
        settings = {"CKPT_MODE": self.order, "RUN": self.run, "CKPT_SAVE_STEPS": str(SAVE_STEPS), "MAX_STEPS": str(MAX_STEPS)}
        users = {"SIDECAR_USER": self.sidecar_user, "TRAINER_USER": self.trainer_user}
        return settings | {name: user for name, user in users.items() if user}


class Failed(Exception):
    """A command of Docker or Compose failed; the text is what it said."""


def call(command: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout_s: float = PATIENCE_S) -> str:
    """Return what a command printed.

    Raises:
        Failed: Its exit code is not 0.
        subprocess.TimeoutExpired: It is killed.
    """
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


@functools.cache
def compose_command() -> tuple[str, ...]:
    """Return Compose v2 if Docker has it, else docker-compose.

    Raises:
        Failed: Neither is there.
    """
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            call([*command, "version"])
        except (Failed, OSError):
            continue
        return command
    raise Failed("neither 'docker compose' nor docker-compose works here: install Docker with Compose")


class Project:
    """One Compose project."""

    def __init__(
        self, name: str, *, files: Sequence[str] = ("compose.yaml",), environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = [*compose_command(), "-p", name, *(part for file in files for part in ("-f", str(FOLDER / file)))]
        self._environ = os.environ | dict(environ or {})

    def compose(self, *arguments: str, settings: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S) -> str:
        """Run a Compose command. Raises as ``call``."""
        return call([*self._command, *arguments], {**self._environ, **(settings or {})}, timeout_s=timeout_s)

    def build(self, *services: str) -> None:
        """Build images, saying what is done."""
        subprocess.run([*self._command, "build", *services], env=self._environ, check=True, timeout=BUILD_S)

    def containers(self, *services: str) -> dict[str, str]:
        """Return the ids of services' containers, also of those that have ended."""
        of_project = ["--filter", f"label={_LABEL}.project={self.name}"]
        found = {
            s: call(["docker", "ps", "-aq", *of_project, "--filter", f"label={_LABEL}.service={s}"]).split() for s in services
        }
        return {service: ids[0] for service, ids in found.items() if ids}

    def volumes(self) -> list[str]:
        """Return the names of the project's volumes."""
        return call(["docker", "volume", "ls", "-q", "--filter", f"label={_LABEL}.project={self.name}"]).split()

    def uninterrupted(self) -> str:
        """Return the digest of a run without this project: no hook, no sidecar, no network."""
        image = self._environ.get("TRAINER_IMAGE") or "checkpoint-trainer"
        where = ["--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp"]
        script = ["train_hf.py", "--max-steps", str(MAX_STEPS), "--output-dir", "/tmp/output"]  # noqa: S108 - the container's
        return digest_in(call(["docker", "run", *where, "--entrypoint=python", image, *script]).splitlines())

    def keys(self, run: str) -> list[str]:
        """Return the keys in the store below a run's prefix, without it."""
        found = self.compose("run", "--rm", "-T", "bucket", "list").split()
        return [key.removeprefix(f"{run}/") for key in found if key.startswith(f"{run}/")]

    def down(self) -> None:
        """Remove everything that the project started."""
        self.compose("down", "--volumes", "--timeout", "0")


class ComposePod(SidecarLog):
    """One pod of a project, from its start on an empty volume until it is removed with the volume."""

    def __init__(self, timeline: Timeline, project: Project, variant: Variant) -> None:
        super().__init__(timeline)
        self._project = project
        self._variant = variant
        self._settings = variant.settings()
        project.compose("up", "-d", "--no-build", "sidecar", "trainer", settings=self._settings)
        self._ids = project.containers("trainer", "sidecar")
        self._sidecar_log = Process(["docker", "logs", "-f", self._ids["sidecar"]], os.environ, self.on_sidecar)
        self._trainer_log = Process(["docker", "logs", "-f", self._ids["trainer"]], os.environ, self.on_trainer)

    def stop(self) -> None:
        """End the pod as the kubelet does. Each container has the grace period that compose.yaml gives it."""
        if self._variant.order == "classic":
            self._timeline.say("kubelet", "SIGTERM to the trainer and the sidecar")
            call(["docker", "kill", "--signal=TERM", *self._ids.values()])
        else:
            self._timeline.say("kubelet", "SIGTERM to the trainer, then to the sidecar")
            self._project.compose("stop", "trainer", "sidecar", settings=self._settings)
        self._exited()

    def finish(self) -> None:
        """Wait until the training has ended; a classic sidecar ends by itself then, a native one is told."""
        call(["docker", "wait", self._ids["trainer"]])
        if self._variant.order == "native":
            self._project.compose("stop", "sidecar", settings=self._settings)
        self._exited()
        self._timeline.say("script", f"finished, exit code {self.exit_codes()[0]}; weights {self.digest()[:16]}…")

    def _exited(self) -> None:
        call(["docker", "wait", *self._ids.values()])
        for log in (self._sidecar_log, self._trainer_log):
            log.wait(PATIENCE_S)

    def exit_codes(self) -> tuple[int, int]:
        """Return the exit codes of trainer and sidecar."""
        found = call(["docker", "inspect", "-f", "{{.State.ExitCode}}", self._ids["trainer"], self._ids["sidecar"]]).split()
        return int(found[0]), int(found[1])

    def digest(self) -> str:
        """Return the digest of the weights with which the training script ended."""
        return digest_in(self._trainer_log.lines)

    def last_step(self) -> int:
        """Return the last step that the trainer made, as it said itself on the volume."""
        told: dict[str, Any] = json.loads(self.read(".ckpt/trainer.json")[0])
        return int(told["step"])

    def read(self, path: str) -> tuple[bytes, str]:
        """Return a file of the volume and its owner as ``UID:GID``, also when the containers have ended."""
        copy = subprocess.run(
            ["docker", "cp", f"{self._ids['sidecar']}:/checkpoints/{path}", "-"], capture_output=True, check=True, timeout=60
        )
        with tarfile.open(fileobj=io.BytesIO(copy.stdout)) as archive:
            member = archive.getmembers()[0]
            file = archive.extractfile(member)
            assert file is not None
            return file.read(), f"{member.uid}:{member.gid}"

    def remove(self) -> None:
        """Remove the pod and its volume."""
        call(["docker", "rm", "--force", *self._project.containers("trainer", "sidecar", "pause").values()])
        call(["docker", "volume", "rm", *self._project.volumes()])


def play(
    project: Project,
    variant: Variant,
    *,
    digest: str,
    timeline: Timeline,
    look: Callable[[ComposePod], None] = lambda _: None,
) -> Outcome:
    """Preempt a pod, remove it with its volume, and let another one finish.

    Args:
        project: With the store running.
        variant: How the pods are run and ended.
        digest: Of the weights of an uninterrupted run.
        timeline: Where it is told.
        look: Called with the preempted pod when it has ended, before it is removed.

    Raises:
        Failed: Docker or Compose refused something.
        TimeoutError: Something did not happen in time.
        ValueError: The training script did not do what it should.
    """
    timeline.heading(f"pod 1: trains, then gets SIGTERM between two saves ({variant.order} sidecar)")
    first = ComposePod(timeline, project, variant)
    first.wait_for("checkpoint_committed", timeout_s=PATIENCE_S, step=SAVE_STEPS)
    first.stop()
    codes, last_step = first.exit_codes(), first.last_step()
    look(first)
    timeline.heading("the volume is deleted with the pod; pod 2 starts on an empty one")
    first.remove()
    second = ComposePod(timeline, project, variant)
    second.finish()
    second_codes = second.exit_codes()
    outcome = judge(
        first,
        second,
        told_s=at_s(first.wait_for("termination_noticed", timeout_s=0)),
        last_step=last_step,
        digests=(digest, second.digest()),
        keys=project.keys(variant.run),
        trainer_exit_codes=(codes[0], second_codes[0]),
        sidecar_exit_codes=(codes[1], second_codes[1]),
    )
    second.remove()
    return outcome


def start_store(project: Project) -> threading.Thread:
    """Start the S3 server and make its bucket, in the background."""
    starting = threading.Thread(target=project.compose, args=("up", "-d", "--no-build", "bucket"), daemon=True)
    starting.start()
    return starting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code: 0 only if nothing was lost and the weights are bit-identical."""
    options = _options(arguments)
    files = ["compose.yaml", *(["compose.ceph.yaml"] if options.store == "ceph" else [])]
    variant = Variant(order=options.order, sidecar_user=options.sidecar_user, trainer_user=options.trainer_user)
    timeline = Timeline()
    try:
        project = Project("checkpoint-demo", files=files)
        project.build("sidecar", "trainer", *(["s3"] if options.store == "ceph" else []))
        try:
            timeline.heading("the same script, never interrupted, without this project; beside it the S3 server starts")
            starting = start_store(project)
            digest = project.uninterrupted()
            timeline.say("script", f"{MAX_STEPS} steps; weights {digest[:16]}…")
            starting.join()
            outcome = play(project, variant, digest=digest, timeline=timeline)
        finally:
            project.down()
    except (Failed, TimeoutError, subprocess.SubprocessError, OSError, ValueError) as error:
        complain(str(error))
        return 1
    show(outcome, as_json=options.json)
    return 0 if outcome.ok else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.compose", description="The demo in containers.")
    parser.add_argument("--store", choices=["minio", "ceph"], default="minio")
    parser.add_argument("--order", choices=["native", "classic"], default="native", help="in which the containers are stopped")
    parser.add_argument("--sidecar-user", default="", metavar="UID:GID")
    parser.add_argument("--trainer-user", default="", metavar="UID:GID")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
