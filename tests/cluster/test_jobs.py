"""Jobs whose pods are taken away in every way that Kubernetes has."""

from __future__ import annotations

import time

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import SIDECAR, Refused, kubectl, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, assert_no_step_was_lost, steps
from tests.cluster.workloads import Workloads, named

STEPS = 100


@pytest.fixture
def expected() -> str:
    """The weights of a run that nothing interrupts."""
    return weights_after(STEPS)


def test_a_deleted_pod_is_replaced_and_goes_on_with_the_next_step(story: Story, workloads: Workloads, expected: str) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)))
    first = story.at_step(25)
    story.namespace.delete_pod(first.pod)
    assert story.weights() == expected
    before, after = story.lives()
    assert_no_step_was_lost(before, after)
    [report] = next(life for life in story.sidecars() if life.pod == first.pod).events("exit_report")
    assert report["grace_used_s"] < 10
    story.completed()
    assert STEPS in story.committed()


def test_a_drained_node_gives_its_pod_to_another_one(
    story: Story, workloads: Workloads, two_nodes: list[str], expected: str
) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)))
    first = story.at_step(25)
    node = story.namespace.watch.pods[first.pod]["spec"]["nodeName"]
    try:
        # Only this test's pod: others may run beside it.
        selector = f"--pod-selector=batch.kubernetes.io/controller-uid={_owner(story)}"
        kubectl("drain", node, selector, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=60s")
        after = story.at_step(STEPS, life=1)
    finally:
        kubectl("uncordon", node)
    assert story.namespace.watch.pods[after.pod]["spec"]["nodeName"] != node
    assert_no_step_was_lost(*story.lives())
    assert story.weights() == expected


def test_a_sidecar_that_is_killed_comes_back_and_training_does_not_notice(
    story: Story, workloads: Workloads, expected: str
) -> None:
    pod = workloads.file_pod(STEPS=STEPS)
    pod["spec"]["shareProcessNamespace"] = True  # else nobody in the pod can kill it
    story.start(workloads.job(pod))
    first = story.at_step(10)
    kill = (
        "import os, pathlib; [os.kill(int(p.parent.name), 9) for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')"
        " if b'checkpoint-sidecar\\0run' in p.read_bytes()]"
    )
    story.namespace.kubectl("exec", first.pod, "-c", "trainer", "--", "python3", "-c", kill)
    until(lambda: len(story.sidecars()) == 2, what="the sidecar is back")
    assert story.weights() == expected
    assert len(story.lives()) == 1
    story.completed()
    assert STEPS in story.committed()


def test_a_suspended_job_goes_on_when_it_is_resumed(story: Story, workloads: Workloads, expected: str) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)))
    first = story.at_step(25)
    story.namespace.patch("job", "run", {"spec": {"suspend": True}})
    until(lambda: first.pod in story.namespace.watch.gone_at_s, what="the pod is gone")
    story.namespace.patch("job", "run", {"spec": {"suspend": False}})
    assert story.weights() == expected
    assert_no_step_was_lost(*story.lives())
    story.completed()


def test_a_save_longer_than_the_grace_period_costs_one_interval(story: Story, workloads: Workloads, expected: str) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS, SAVE_S=8, SAVE_EVERY=20)), options=("--grace", "4"))
    story.durable(20)
    first = story.at_step(25)
    story.namespace.delete_pod(first.pod)
    assert story.weights(timeout_s=200) == expected
    assert steps(story.lives()[1])[0] == 21


@pytest.mark.parametrize("restart", ["Never", "OnFailure"])
def test_a_trainer_out_of_memory_starts_again_from_the_newest_durable_step(
    story: Story, workloads: Workloads, expected: str, restart: str
) -> None:
    pod = workloads.file_pod(STEPS=STEPS, TROUBLE="memory", TROUBLE_AT=45, SAVE_EVERY=20)
    pod["spec"]["restartPolicy"] = restart
    named(pod, "trainer")["resources"]["limits"] = {"memory": "128Mi"}
    story.start(workloads.job(pod))
    assert story.weights() == expected
    before, after = story.lives()
    assert steps(after)[0] == 41
    assert (before.pod == after.pod) == (restart == "OnFailure")
    story.completed()


def test_a_sidecar_out_of_memory_comes_back_and_training_does_not_notice(
    story: Story, workloads: Workloads, expected: str
) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)))
    first = story.at_step(10)
    # The kernel ends the largest process: that is the sidecar, and not one of those that take the memory.
    take = "import os, time; [os.fork() for _ in range(5)]; held = os.urandom(24 << 20); time.sleep(20)"
    with pytest.raises(Refused):
        story.namespace.kubectl("exec", first.pod, "-c", SIDECAR, "--", "python3", "-c", take)
    until(lambda: len(story.sidecars()) == 2, what="the sidecar is back")
    assert story.weights() == expected
    assert len(story.lives()) == 1
    story.durable(STEPS)


def test_a_job_that_passed_its_deadline_goes_on_under_the_same_name(story: Story, workloads: Workloads, expected: str) -> None:
    job = workloads.job(workloads.file_pod(STEPS=STEPS, SAVE_EVERY=1000))
    story.start(job)
    first = story.at_step(25)
    story.namespace.patch("job", "run", {"spec": {"activeDeadlineSeconds": 1}})
    story.completed(condition="Failed")
    until(lambda: first.pod in story.namespace.watch.gone_at_s, what="the pod is gone")
    story.namespace.kubectl("delete", "job", "run")
    story.start(job)
    assert story.weights() == expected
    assert_no_step_was_lost(*story.lives())


def test_a_pod_deleted_while_it_resumes_leaves_it_to_the_next(story: Story, workloads: Workloads, expected: str) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS, SIZE_MIB=256, SAVE_EVERY=1000)))
    first = story.at_step(25)
    story.namespace.delete_pod(first.pod)
    second = story.pod(other_than=first.pod, timeout_s=90)["metadata"]["name"]
    # Its sidecar has started, and its trainer, which starts when the sidecar answers, has not done a step.
    until(lambda: [life for life in story.sidecars() if life.pod == second], what="the second sidecar", every_s=0.02)
    story.namespace.delete_pod(second)
    assert story.weights(timeout_s=200) == expected
    done = [step for life in story.lives() for step in steps(life)]
    assert done == list(range(1, STEPS + 1))


def test_a_pod_deleted_while_a_save_is_sent_early_loses_nothing(story: Story, workloads: Workloads, expected: str) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS, SIZE_MIB=256, SAVE_S=5, SAVE_EVERY=30)))
    story.said("saves 30")
    time.sleep(2.5)  # the first half is written, and being sent
    story.namespace.delete_pod(story.lives()[0].pod)
    assert story.weights(timeout_s=200) == expected
    assert_no_step_was_lost(*story.lives())


def test_a_pod_evicted_for_its_disk_goes_on_from_the_newest_durable_step(
    story: Story, workloads: Workloads, expected: str
) -> None:
    pod = workloads.file_pod(STEPS=STEPS, TROUBLE="disk", TROUBLE_AT=45, SAVE_EVERY=20)
    named(pod, "trainer")["resources"]["limits"] = {"ephemeral-storage": "100Mi"}
    story.start(workloads.job(pod))
    first = story.at_step(45)
    assert story.weights(timeout_s=200) == expected
    assert story.namespace.watch.pods[first.pod]["status"]["reason"] == "Evicted"
    assert steps(story.lives()[1])[0] == 41


def test_a_jobset_completes_after_more_preemptions_than_it_has_restarts(
    story: Story, workloads: Workloads, jobsets: None, expected: str
) -> None:
    story.kind = "jobset"
    story.start(workloads.jobset(workloads.file_pod(STEPS=STEPS), nodes=1, max_restarts=1))
    for life in range(3):
        story.namespace.delete_pod(story.at_step(25 * (life + 1), life=life).pod)
    assert story.weights() == expected
    story.completed()


def test_a_classic_sidecar_ends_after_the_trainer_that_is_told_to_go_with_it(
    story: Story, workloads: Workloads, expected: str
) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)), options=("--grace", "60", "--mode", "classic"))
    first = story.at_step(25)
    story.namespace.delete_pod(first.pod)
    assert story.weights() == expected
    assert_no_step_was_lost(*story.lives())
    story.completed()


def test_two_users_of_one_group_share_the_volume(
    story: Story, workloads: Workloads, settings: ClusterSettings, expected: str
) -> None:
    if settings.user is None:
        pytest.skip("the cluster gives one user to all containers")
    pod = workloads.file_pod(STEPS=STEPS)
    named(pod, "trainer")["securityContext"]["runAsUser"] = settings.user + 1
    story.start(workloads.job(pod), options=("--grace", "60", "--run-as-user", str(settings.user)))
    first = story.at_step(25)
    story.namespace.delete_pod(first.pod)
    assert story.weights() == expected
    assert_no_step_was_lost(*story.lives())
    story.completed()


def _owner(story: Story) -> str:
    uid: str = story.namespace.get("job", "run")["metadata"]["uid"]
    return uid
