"""What a Job makes of a trainer that saved just in time and ended with 143."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sidecar.kubernetes.inject import inject
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import asked, in_pod, job, several
from tests.deploy.schemas import VERSIONS, complaints

GIVEN = {"image": "registry/x:1", "secret": "data-connection"}
IGNORED = {"action": "Ignore", "onExitCodes": {"containerName": "main", "operator": "In", "values": [143]}}
DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


def never(**fields: Any) -> dict[str, Any]:
    return restarting("Never", **fields)


def restarting(policy: str | None, **fields: Any) -> dict[str, Any]:
    """A Job with the default ``backoffLimit``, whose pods have a restart policy or none."""
    document = job()
    pod = document["spec"]["template"]["spec"]
    del document["spec"]["backoffLimit"], pod["restartPolicy"]
    pod |= {} if policy is None else {"restartPolicy": policy}
    document["spec"] |= fields
    return document


def jobset(failure_policy: dict[str, Any] | None = None, *, restart: str | None = "Never", **fields: Any) -> dict[str, Any]:
    inner = restarting(restart, **fields)["spec"]
    policy = {} if failure_policy is None else {"failurePolicy": failure_policy}
    return several("JobSet", policy | {"replicatedJobs": [{"name": "node", "template": {"spec": inner}}]})


def of_kind(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def runtime(failure_policy: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A training runtime of the same set, whose container has the name that Trainer wants."""
    inner = jobset(failure_policy, **fields)["spec"]
    inner["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = "node"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    inner["replicatedJobs"][0]["template"]["metadata"] = {"labels": labels}
    made = of_kind("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", {"template": {"spec": inner}})
    return made | {"spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, **made["spec"]}}


def cron(**fields: Any) -> dict[str, Any]:
    document = several(
        "Job", {"schedule": "0 0 * * *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": never(**fields)["spec"]}}
    )
    return document | {"kind": "CronJob"}


def set_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if document["kind"] in ("JobSet", "ClusterTrainingRuntime"):
        return set_of(document)["replicatedJobs"][0]["template"]["spec"]
    return spec["jobTemplate"]["spec"] if document["kind"] == "CronJob" else spec


def on_codes(operator: str, *values: int, action: str = "FailJob", name: str = "main") -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": name, "operator": operator, "values": list(values)}}


def about_policies(document: dict[str, Any], **given: str) -> list[str]:
    said = [str(warning) for warning in inject(document, asked(**GIVEN, **given)).warnings]
    return [line for line in said if "Policy" in line or "backoffLimit" in line or "EXIT_CODE" in line]


@pytest.mark.parametrize("made", [never, cron, jobset], ids=["Job", "CronJob", "JobSet"])
def test_preemptions_are_ignored_where_nothing_was_said_about_them(made: Any) -> None:
    done = inject(made(), asked(**GIVEN))
    rules = job_of(done.document)["podFailurePolicy"]["rules"]
    assert rules == [{"action": "Ignore", "onPodConditions": DISRUPTED}, IGNORED]
    assert [said for version in VERSIONS for said in complaints(done.document, version)] == []
    assert about_policies(made()) == []
    assert inject(done.document, asked(**GIVEN)).document == done.document


@pytest.mark.parametrize("version", ["1.28"])
def test_schemas_before_1_29_take_it_too(version: str) -> None:
    done = inject(never(), asked(**GIVEN, kubernetes_version=version, mode="classic"))
    assert len(done.document["spec"]["podFailurePolicy"]["rules"]) == 2
    assert complaints(done.document, version) == []


@pytest.mark.parametrize(
    ("document", "given"),
    [
        (job(), {}),
        (never(podReplacementPolicy="TerminatingOrFailed"), {}),
        (never(), {"kubernetes_version": "1.25", "mode": "classic"}),
        (several("Deployment", {"template": job()["spec"]["template"]}), {}),
    ],
)
def test_where_the_api_does_not_allow_it_none_is_written(document: dict[str, Any], given: dict[str, str]) -> None:
    done = inject(document, asked(**GIVEN, **given)).document
    assert "podFailurePolicy" not in str(done)


@pytest.mark.parametrize("rules", [[], [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}]])
def test_a_policy_that_is_there_stays(rules: list[dict[str, Any]]) -> None:
    document = never(podFailurePolicy={"rules": rules})
    assert inject(document, asked(**GIVEN)).document["spec"]["podFailurePolicy"] == {"rules": rules}


def with_rules(*rules: dict[str, Any]) -> dict[str, Any]:
    return never(podFailurePolicy={"rules": list(rules)})


@pytest.mark.parametrize(
    ("document", "index"),
    [
        (with_rules(on_codes("NotIn", 0)), 0),
        (with_rules(on_codes("In", 143)), 0),
        (with_rules(on_codes("In", 1, 143, action="FailIndex")), 0),
        (with_rules({"action": "Ignore", "onPodConditions": DISRUPTED}, on_codes("NotIn", 0)), 1),
        (with_rules(on_codes("NotIn", 143, action="Ignore"), on_codes("NotIn", 0)), 1),
        (with_rules(IGNORED, on_codes("NotIn", 0)), None),
        (with_rules(on_codes("In", 143, action="Count"), on_codes("NotIn", 0)), None),
        (with_rules(on_codes("In", 2)), None),
        (with_rules(on_codes("NotIn", 0, 143)), None),
        (with_rules(on_codes("NotIn", 0, name="other")), None),
    ],
)
def test_a_rule_that_takes_143_for_a_failure_is_named(document: dict[str, Any], index: int | None) -> None:
    said = [line for line in about_policies(document) if "also takes exit code 143" in line]
    assert [line.partition(": ")[0] for line in said] == ([] if index is None else [f"spec.podFailurePolicy.rules[{index}]"])


def test_a_set_that_begins_anew_as_a_whole_does_so_without_counting_preemptions() -> None:
    document = jobset({"maxRestarts": 3}, backoffLimit=0)
    done = inject(document, asked(**GIVEN))
    [rule] = done.document["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    assert rule["targetReplicatedJobs"] == ["node"]
    assert done.document["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert job_of(done.document)["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onPodConditions": DISRUPTED}, IGNORED]
    assert complaints(done.document, VERSIONS[-1]) == []
    assert [line for line in about_policies(document) if "does not count against maxRestarts" in line]
    assert about_policies(done.document) == []
    assert inject(done.document, asked(**GIVEN)).document == done.document


@pytest.mark.parametrize("policy", [None, {"rules": [{"name": "preempted", "action": "FailJobSet"}]}])
def test_every_part_of_such_a_set_is_a_target(policy: dict[str, Any] | None) -> None:
    document = jobset(policy, backoffLimit=0)
    other = copy.deepcopy(document["spec"]["replicatedJobs"][0]) | {"name": "other"}
    document["spec"]["replicatedJobs"].append(other)
    done = inject(document, asked(**GIVEN)).document
    rule, *theirs = done["spec"]["failurePolicy"]["rules"]
    assert rule["targetReplicatedJobs"] == ["node", "other"]
    assert theirs == (policy or {"rules": []})["rules"]
    assert inject(done, asked(**GIVEN)).document == done


@pytest.mark.parametrize("made", [jobset, runtime], ids=["JobSet", "ClusterTrainingRuntime"])
def test_where_nothing_says_how_containers_restart_a_set_gets_pods_whose_preemption_need_not_count(made: Any) -> None:
    document = made({"maxRestarts": 1}, restart=None)
    done = inject(document, asked(**GIVEN))
    pod = job_of(done.document)["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    codes = IGNORED["onExitCodes"] | {"containerName": pod["containers"][0]["name"]}
    rules = [{"action": "Ignore", "onPodConditions": DISRUPTED}, {"action": "Ignore", "onExitCodes": codes}]
    assert job_of(done.document)["podFailurePolicy"]["rules"] == rules
    assert set_of(done.document)["failurePolicy"] == {"maxRestarts": 1}
    assert [said for version in VERSIONS for said in complaints(done.document, version)] == []
    assert [line.partition(": ")[2][:16] for line in about_policies(document)] == ["Never is written"]
    again = inject(done.document, asked(**GIVEN))
    assert again.document == done.document
    assert about_policies(again.document) == []


def test_a_classic_sidecar_keeps_pods_that_restart_in_place() -> None:
    done = inject(jobset(restart=None), asked(**GIVEN, mode="classic")).document
    assert "restartPolicy" not in job_of(done)["template"]["spec"]
    assert "podFailurePolicy" not in job_of(done)


@pytest.mark.parametrize(
    ("document", "given", "why"),
    [
        (restarting("OnFailure"), {}, "restartPolicy: OnFailure allows no podFailurePolicy"),
        (jobset(restart="OnFailure"), {}, "restartPolicy: OnFailure allows no podFailurePolicy"),
        (runtime(restart="OnFailure"), {}, "restartPolicy: OnFailure allows no podFailurePolicy"),
        (never(podReplacementPolicy="TerminatingOrFailed"), {}, "podReplacementPolicy: TerminatingOrFailed allows no"),
        (never(), {"kubernetes_version": "1.25", "mode": "classic"}, "Kubernetes before 1.26 has no podFailurePolicy"),
        (never(podFailurePolicy={"rules": []}), {}, "no rule of the podFailurePolicy ignores exit code 143"),
        (never(podFailurePolicy={"rules": [on_codes("In", 143, action="Count")]}), {}, "no rule of the podFailurePolicy"),
    ],
)
def test_where_preemptions_count_it_is_said_why(document: dict[str, Any], given: dict[str, str], why: str) -> None:
    [line] = about_policies(document, **given)
    assert "backoffLimit: each preemption counts as a failure, and the job fails after 6: " in line
    assert why in line
    job_of(document)["backoffLimit"] = 100
    assert about_policies(document, **given) == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"backoffLimitPerIndex": 2}, "backoffLimitPerIndex: each preemption counts as a failure, and the index fails after 2"),
        ({"backoffLimitPerIndex": 0, "backoffLimit": 9}, "backoffLimitPerIndex: 0: the first preempted pod fails the index"),
        ({"backoffLimitPerIndex": 9, "backoffLimit": 4}, "backoffLimit: each preemption counts as a failure, and the job"),
        ({"backoffLimitPerIndex": 100}, None),
    ],
)
def test_a_job_whose_indices_have_limits_has_no_other_one_by_default(limits: dict[str, int], said: str | None) -> None:
    rules = {"rules": [on_codes("In", 1, action="FailIndex")]}
    document = never(completionMode="Indexed", completions=2, parallelism=2, podFailurePolicy=rules, **limits)
    lines = [line for line in about_policies(document) if "ackoffLimit" in line]
    assert [line.startswith(f"spec.{said}") for line in lines] == ([True] if said else [])


RULES = {"rules": [{"name": "preempted", "action": "FailJobSet"}], "maxRestarts": 2}


def test_the_rule_of_a_set_stands_in_front_of_those_that_people_wrote() -> None:
    done = inject(jobset(RULES, backoffLimit=0), asked(**GIVEN)).document
    assert complaints(done, VERSIONS[-1]) == []
    [ours, theirs] = done["spec"]["failurePolicy"]["rules"]
    assert (ours["name"], ours["onJobFailureReasons"]) == ("preempted_pods", ["PodFailurePolicy"])
    assert theirs == RULES["rules"][0]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (jobset({"maxRestarts": 2}, restart="OnFailure", backoffLimit=0), "costs the set one of its 2 restarts"),
        (jobset({"maxRestarts": 2}, backoffLimit=0, podFailurePolicy={"rules": []}), "costs the set one of its 2 restarts"),
        (jobset(backoffLimit=0, podFailurePolicy={"rules": []}), "the first preempted pod fails the whole set"),
        (jobset(podFailurePolicy={"rules": [on_codes("NotIn", 0)]}), "also takes exit code 143"),
    ],
)
def test_a_set_that_preemptions_use_up_is_warned_of_and_its_policies_stay(document: dict[str, Any], text: str) -> None:
    assert [line for line in about_policies(document) if text in line]
    done = inject(document, asked(**GIVEN)).document["spec"]
    assert done.get("failurePolicy") == document["spec"].get("failurePolicy")


def test_a_job_that_fails_by_policy_in_a_set_that_restarts_freely_is_right() -> None:
    policy = {
        "rules": [{"name": "a", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}]
    }
    document = jobset(policy, backoffLimit=0, podFailurePolicy={"rules": [on_codes("In", 143)]})
    assert about_policies(document) == []


def test_another_exit_code_of_a_preempted_trainer_is_the_one_that_counts() -> None:
    done = inject(never(), with_given(asked(**GIVEN), {"CKPT_PREEMPTED_EXIT_CODE": "85"})).document
    assert done["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [85]
    in_manifest = never()
    in_manifest["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "CKPT_PREEMPTED_EXIT_CODE", "value": "0"})
    assert "podFailurePolicy" not in inject(in_manifest, asked(**GIVEN)).document["spec"]
    assert [line for line in about_policies(in_manifest) if "counts as succeeded" in line]


@pytest.mark.parametrize(
    ("command", "args", "where", "texts"),
    [
        (["sh", "-c", "torchrun t.py | tee log"], None, "command", ["is that of 'tee'", "keep SIGTERM"]),
        (["bash", "-c"], ["torchrun t.py || true"], "args", ["'|| true' stands in", "keep SIGTERM"]),
        (["bash", "-o", "pipefail", "-c", "torchrun t.py | tee log"], None, "command", ["keep SIGTERM"]),
        (["bash", "-c", "exec > >(tee log) 2>&1\nexec torchrun t.py"], None, "command", []),
        (["bash", "-c", "torchrun t.py --x 'a|b'"], None, "command", []),
    ],
)
def test_a_shell_that_swallows_the_exit_code_is_warned_of(
    command: list[str], args: list[str] | None, where: str, texts: list[str]
) -> None:
    document = in_pod("containers.0.command", command)
    if args is not None:
        document["spec"]["template"]["spec"]["containers"][0]["args"] = args
    said = [warning for warning in inject(document, asked(**GIVEN)).warnings if "shell" in warning.text]
    assert [warning.path for warning in said] == [f"spec.template.spec.containers[0].{where}"] * len(texts)
    assert all(text in warning.text for text, warning in zip(texts, said, strict=True))


@pytest.mark.parametrize(
    ("command", "is_shared", "warned"),
    [
        (["tini", "--", "sh", "-c", "python train.py"], False, True),
        (["/usr/bin/tini", "-g", "--", "/bin/dash", "-c", "X=1 python train.py"], False, True),
        (["tini", "--", "bash", "-c", "python train.py > log"], False, True),
        (["tini", "--", "bash", "-c", "python train.py"], False, False),
        (["tini", "--", "sh", "-c", "exec python train.py"], False, False),
        (["tini", "--", "python", "train.py"], False, False),
        (["env", "A=1", "sh", "-c", "python train.py"], False, False),
        (["sh", "-c", "python train.py"], False, False),
        (["sh", "-c", "python train.py"], True, True),
        (["bash", "-c", "python train.py"], True, False),
    ],
)
def test_a_shell_that_sigterm_ends_before_its_trainer_is_warned_of(command: list[str], is_shared: bool, warned: bool) -> None:
    """dash stays in front of a single command. As PID 1 it ignores the signal; behind an init it dies, and all with it."""
    document = in_pod("containers.0.command", command)
    document["spec"]["template"]["spec"]["shareProcessNamespace"] = is_shared
    said = [warning.text for warning in inject(document, asked(**GIVEN)).warnings if "shell" in warning.text]
    assert ["not PID 1" in text for text in said] == [True] * warned


PIPED = ["bash", "-c", "torchrun t.py | tee log"]
_CONTAINER = {"name": "main", "image": "i", "command": PIPED}


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (
            of_kind("trainer.kubeflow.org/v1alpha1", "TrainJob", {"runtimeRef": {"name": "r"}, "trainer": {"command": PIPED}}),
            "spec.trainer.command",
        ),
        (
            of_kind(
                "ray.io/v1",
                "RayJob",
                {
                    "entrypoint": PIPED[-1],
                    "rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": [{"name": "h", "image": "i"}]}}}},
                },
            ),
            "spec.entrypoint",
        ),
        (
            of_kind(
                "kubeflow.org/v2beta1",
                "MPIJob",
                {
                    "mpiReplicaSpecs": {
                        "Launcher": {"template": {"spec": {"containers": [_CONTAINER]}}},
                        "Worker": {"template": {"spec": {"containers": [{"name": "w", "image": "i"}]}}},
                    }
                },
            ),
            "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].command",
        ),
    ],
    ids=["TrainJob", "RayJob", "MPIJob"],
)
def test_a_command_that_stands_elsewhere_than_in_the_trainers_container_is_looked_at(
    document: dict[str, Any], where: str
) -> None:
    said = [warning.path for warning in inject(document, asked(**GIVEN)).warnings if "is that of 'tee'" in warning.text]
    assert said == [where]


@pytest.mark.parametrize(
    ("rules", "is_said"),
    [
        ([{"action": "FailJob", "onPodConditions": DISRUPTED}, IGNORED], True),
        ([{"action": "FailIndex", "onPodConditions": DISRUPTED}], True),
        ([{"action": "Ignore", "onPodConditions": DISRUPTED}, {"action": "FailJob", "onPodConditions": DISRUPTED}], False),
        ([{"action": "Count", "onPodConditions": DISRUPTED}], False),
        ([{"action": "FailJob", "onPodConditions": [{"type": "ConfigIssue"}]}], False),
    ],
)
def test_a_rule_that_takes_a_disruption_for_a_failure_is_named(rules: list[dict[str, Any]], is_said: bool) -> None:
    said = [line for line in about_policies(with_rules(*rules)) if "preempted, evicted or drained" in line]
    assert bool(said) is is_said


def test_an_operator_that_counts_preemptions_must_not_stop_at_the_first() -> None:
    replicas = {
        "Worker": {"restartPolicy": "OnFailure", "template": {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}}
    }
    document = several("PyTorchJob", {"runPolicy": {"backoffLimit": 0}, "pytorchReplicaSpecs": replicas})
    assert "spec.runPolicy.backoffLimit" in [warning.path for warning in inject(document, asked(**GIVEN)).warnings]
    document["spec"]["runPolicy"]["backoffLimit"] = 3
    assert "spec.runPolicy.backoffLimit" not in [warning.path for warning in inject(document, asked(**GIVEN)).warnings]


@pytest.mark.parametrize(
    ("document", "pause"),
    [
        (never(completionMode="Indexed", completions=2, parallelism=2), "2: Kubernetes may wait 20 s before"),
        (jobset(parallelism=64), "64: Kubernetes may wait 600 s before"),
        (jobset(parallelism=64, backoffLimit=0), None),
        (never(completionMode="Indexed", parallelism=8, backoffLimitPerIndex=9), None),
        (never(completionMode="Indexed", parallelism=1), None),
    ],
)
def test_the_pause_before_pods_of_a_preempted_job_come_again_is_told(document: dict[str, Any], pause: str | None) -> None:
    lines = [str(line) for line in inject(document, asked(**GIVEN)).warnings if "pause" in str(line)]
    assert [f"parallelism: {pause}" in line for line in lines] == ([] if pause is None else [True])
