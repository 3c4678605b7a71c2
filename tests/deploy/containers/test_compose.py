"""The compose scenario against Ceph RGW: pods of several kinds lose their volume, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from examples.demo.compose import ComposePod, Failed, Project, Variant, play, start_store
from examples.demo.outcome import Outcome
from examples.demo.timeline import Timeline
from tests.deploy.containers.building import FILES, IMAGES

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

VARIANTS = {
    "native, any user of OpenShift": Variant(sidecar_user="1000680000:0", trainer_user="1000680000:0"),
    "classic, two users of one group": Variant(order="classic", sidecar_user="10001:3000", trainer_user="10002:3000"),
}


@dataclass
class Played:
    """What became of a variant, and what was seen in its first pod when that had ended."""

    outcome: Outcome | None = None
    owners: dict[str, str] = field(default_factory=dict)
    held: list[bool] = field(default_factory=list)

    def look(self, pod: ComposePod) -> None:
        self.owners = {path: pod.read(path)[1] for path in (".ckpt/trainer.json", ".ckpt/exit-report.json")}
        self.held = [event["held"] for event in pod.events if event["event"] == "checkpoint_finished"]


def _play(variant: Variant, digest: Future[str]) -> Played:
    played, project = Played(), Project(f"checkpoint-test-{uuid.uuid4().hex[:8]}", files=FILES, environ=IMAGES)
    try:
        start_store(project).join()
        played.outcome = play(project, variant, digest=digest.result(), timeline=Timeline(), look=played.look)
    finally:
        project.down()
    return played


@pytest.fixture(scope="module")
def played(images: dict[str, str]) -> Iterator[dict[str, Future[Played]]]:
    """All variants side by side, each with a store of its own; the uninterrupted run is what they are compared with."""
    with ThreadPoolExecutor(len(VARIANTS) + 1) as pool:
        digest = pool.submit(Project("checkpoint-test", environ=images).uninterrupted)
        yield {name: pool.submit(_play, variant, digest) for name, variant in VARIANTS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_pod_of_containers_loses_nothing(name: str, played: dict[str, Future[Played]]) -> None:
    outcome = played[name].result().outcome
    assert outcome is not None
    assert outcome.ok, outcome


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints_are_held_against_rotation_also_for_another_user(name: str, played: dict[str, Future[Played]]) -> None:
    of, variant = played[name].result(), VARIANTS[name]
    assert of.owners[".ckpt/trainer.json"] == variant.trainer_user
    assert of.owners[".ckpt/exit-report.json"] == variant.sidecar_user
    assert of.held
    assert all(of.held)


def _configuration(**environ: str) -> Any:
    return yaml.safe_load(Project("checkpoint-test", environ=environ).compose("config"))


def test_the_store_is_a_pinned_minio_unless_another_one_is_named(docker: None) -> None:
    name, _, tag = _configuration()["services"]["s3"]["image"].rpartition(":")
    assert name == "quay.io/minio/minio"
    assert tag.startswith("RELEASE.20")
    assert _configuration(S3_IMAGE="other/minio:1")["services"]["s3"]["image"] == "other/minio:1"


def test_containers_of_the_pod_may_do_nothing_that_they_do_not_need(docker: None) -> None:
    services = _configuration()["services"]
    for name in ("pause", "sidecar", "trainer"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
    assert not any(name.startswith("AWS_") for name in services["trainer"]["environment"])


def test_a_command_that_fails_says_why(docker: None) -> None:
    with pytest.raises(Failed, match=r"no-such-file\.yaml"):
        Project("checkpoint-test", files=("no-such-file.yaml",)).compose("config")
