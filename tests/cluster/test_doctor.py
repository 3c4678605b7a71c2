"""``inject --doctor``: the store is examined in the pod, before the trainer starts."""

from __future__ import annotations

from dataclasses import replace

from tests.cluster.file_trainer import weights_after
from tests.cluster.story import Story
from tests.cluster.workloads import Workloads, secret

STEPS = 30
OPTIONS = ("--grace", "60", "--doctor")
DOCTOR = "checkpoint-doctor"


def test_a_sound_pod_trains_after_its_examination(story: Story, workloads: Workloads) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)), options=OPTIONS)
    assert story.weights() == weights_after(STEPS)
    story.completed()
    [examined] = story.namespace.watch.of(DOCTOR)
    for check in ("permission:PutObject", "verification", "clock", "hard-links", "space"):
        assert examined.has(check), examined.lines
    assert examined.has("0 failures"), examined.lines


def test_wrong_credentials_end_the_pod_before_its_trainer_starts(story: Story, workloads: Workloads) -> None:
    story.namespace.apply(secret(replace(workloads.settings, secret_key="wrong-secret-key")))
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS), backoffLimit=0), options=OPTIONS)

    story.completed(condition="Failed")
    assert story.lives() == []
    examined = story.namespace.watch.of(DOCTOR)[-1]
    assert any("credentials" in line and line.startswith("failure") for line in examined.lines), examined.lines
    assert examined.has("1 failure"), examined.lines
