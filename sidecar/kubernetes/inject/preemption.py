"""What becomes of a Job when its trainer was preempted: saved, and ended with exit code 143.

A ``podFailurePolicy`` that ignores that is written where there is none. Rules that people wrote stay, and are warned of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from sidecar.kubernetes.inject.fields import Fields, growing, named, put, section
from sidecar.kubernetes.inject.pod_templates import InjectWarning, Place
from sidecar.kubernetes.inject.pods import Pod

_PREEMPTED = 143
_SETTING = "CKPT_PREEMPTED_EXIT_CODE"
_RESTART_FREELY = "RestartJobSetAndIgnoreMaxRestarts"
_FAILS = ("FailJob", "FailIndex")
_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def preempted_exit_code(pod: Pod) -> int:
    """Return the exit code of a trainer that has saved just in time: the setting's, of this injection or of the manifest."""
    there = (named(pod.trainer.get("env") or [], _SETTING) or {}).get("value")
    said = str(pod.options.settings.get(_SETTING) or there or "")
    return int(said) if said.isdecimal() else _PREEMPTED


def put_failure_policy(pod: Pod) -> None:
    """Let preemptions not count as failures of the Job, where its pods may have such a policy and nobody wrote one.

    In a JobSet whose Jobs fail with their first pod all pods begin anew together. That stays so for pods that are lost: the
    Job fails, and the set is restarted without counting it.
    """
    job = pod.place.job
    if job is None or not _may_have_policy(pod, job):
        return
    ignored = {"action": "Ignore", "onExitCodes": _exit_codes(pod)}
    if _may_be_old(pod):
        ignored["onPodConditions"] = []  # which schemas before 1.29 want beside exit codes
    if not (pod.place.kind.has_replicated_jobs and job.get("backoffLimit") == 0):
        rules: list[Any] = [{"action": "Ignore", **_DISRUPTED}, ignored]
    elif _put_set_rule(pod.place):
        rules = [{"action": "FailJob", **_DISRUPTED}, ignored]
    else:
        rules = [ignored]
    put(job, "podFailurePolicy", {"rules": _unshared(rules)}, before=("podReplacementPolicy", "template"))


def _may_have_policy(pod: Pod, job: Fields) -> bool:
    """By the rules of the API: beside ``restartPolicy: Never`` and no other replacement policy than ``Failed``."""
    version = pod.options.kubernetes_version
    return (
        "podFailurePolicy" not in job
        and pod.spec.get("restartPolicy") == "Never"
        and job.get("podReplacementPolicy") in (None, "Failed")
        and (version is None or version >= (1, 26))
        and preempted_exit_code(pod) != 0
    )


def _may_be_old(pod: Pod) -> bool:
    version = pod.options.kubernetes_version
    return not pod.options.is_native if version is None else version < (1, 29)


def _exit_codes(pod: Pod) -> dict[str, Any]:
    return {"containerName": str(pod.trainer.get("name")), "operator": "In", "values": [preempted_exit_code(pod)]}


def _put_set_rule(place: Place) -> bool:
    """Let the set restart freely when one of its Jobs fails by its podFailurePolicy. Returns whether it does."""
    policy = section(_set_of(place), "failurePolicy", "spec", before=("replicatedJobs",))
    there = policy.get("rules")
    if not there:
        rule = {
            "name": "preempted",
            "action": _RESTART_FREELY,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": [place.name],
        }
        growing(policy, "rules", "spec.failurePolicy").append(rule)
        return True
    ours = named(there, "preempted")
    if ours is not None and ours.get("action") == _RESTART_FREELY and place.name not in ours.get("targetReplicatedJobs", ()):
        ours["targetReplicatedJobs"].append(place.name)
    return _restarts_freely(place)


def _set_of(place: Place) -> Fields:
    """Return the spec of the JobSet."""
    return place.above[-4]


def _restarts_freely(place: Place) -> bool:
    """Whether the set restarts without counting when one of its Jobs fails by its podFailurePolicy."""
    if not place.kind.has_replicated_jobs:
        return False
    for rule in (_set_of(place).get("failurePolicy") or {}).get("rules") or ():
        targets, reasons = rule.get("targetReplicatedJobs") or [place.name], rule.get("onJobFailureReasons")
        if place.name in targets and (not reasons or "PodFailurePolicy" in reasons):
            return bool(rule.get("action") == _RESTART_FREELY)
    return False


def warnings_of_policies(pod: Pod) -> Iterator[InjectWarning]:
    """Yield what makes of a preemption a failure of the Job, or its success."""
    job, path, code = pod.place.job, pod.place.job_path, preempted_exit_code(pod)
    if code == 0:
        text = f"{_SETTING} is 0: a preempted pod counts as succeeded, and the Job is complete before the training is"
        yield InjectWarning(f"{pod.trainer_path}.env", text)
    if job is None:
        return
    rules = (job.get("podFailurePolicy") or {}).get("rules") or []
    for index, rule in enumerate(rules):
        if rule.get("onExitCodes") and "containerName" not in rule["onExitCodes"]:
            text = "without containerName it takes the sidecar's exit codes for the trainer's"
            yield InjectWarning(f"{path}.podFailurePolicy.rules[{index}].onExitCodes", text)
    disrupted = _first_rule_of_disruptions(rules)
    if disrupted is not None and rules[disrupted].get("action") in _FAILS and not _restarts_freely(pod.place):
        text = (
            f"{rules[disrupted]['action']} takes a pod that is preempted, evicted or drained for a failure: use action Ignore"
        )
        yield InjectWarning(f"{path}.podFailurePolicy.rules[{disrupted}]", text)
    failing = _first_failing_rule(pod, rules, code)
    if failing is not None and not _restarts_freely(pod.place):
        text = (
            f"{rules[failing]['action']} also takes exit code {code}, the one of a trainer that saved and left, for a failure: "
            f"put a rule with action Ignore, containerName {pod.trainer.get('name')} and values [{code}] in front of it"
        )
        yield InjectWarning(f"{path}.podFailurePolicy.rules[{failing}]", text)
    yield from _of_limits(pod, job, rules, is_failing=failing is not None)


def _first_failing_rule(pod: Pod, rules: list[Fields], code: int) -> int | None:
    """Return the index of the rule that decides about the trainer's exit code, if it fails the Job."""
    for index, rule in enumerate(rules):
        codes = rule.get("onExitCodes") or {}
        if not codes or codes.get("containerName") not in (None, pod.trainer.get("name")):
            continue
        if (code in (codes.get("values") or ())) == (codes.get("operator", "In") == "In"):
            return index if rule.get("action") in _FAILS else None
    return None


def _first_rule_of_disruptions(rules: list[Fields]) -> int | None:
    """Return the index of the rule that decides about pods that the cluster ends, if one speaks of them."""
    for index, rule in enumerate(rules):
        if any(condition.get("type") == "DisruptionTarget" for condition in rule.get("onPodConditions") or ()):
            return index
    return None


def _of_limits(pod: Pod, job: Fields, rules: list[Fields], *, is_failing: bool) -> Iterator[InjectWarning]:
    place, path = pod.place, pod.place.job_path
    is_covered = is_failing or _may_have_policy(pod, job) or any(_ignores_preemption(rule) for rule in rules)
    if job.get("backoffLimit") == 0 and not place.kind.has_replicated_jobs and not is_covered:
        text = "0: a preempted pod fails the job; raise it, or let podFailurePolicy ignore DisruptionTarget and exit code 143"
        yield InjectWarning(f"{path}.backoffLimit", text)
    if not place.kind.has_replicated_jobs or job.get("backoffLimit") != 0 or _restarts_freely(place):
        return
    policy = _set_of(place).get("failurePolicy") or {}
    if _may_have_policy(pod, job) and not policy.get("rules"):
        text = (
            "0: a lost pod restarts the whole set; failurePolicy.rules says from now on that a preemption does not count "
            "against maxRestarts (JobSet 0.6 or later)"
        )
        yield InjectWarning(f"{path}.backoffLimit", text)
    elif policy.get("maxRestarts"):
        text = f"0: each preempted pod costs the set one of its {policy['maxRestarts']} restarts (maxRestarts)"
        yield InjectWarning(f"{path}.backoffLimit", f"{text}: use a failurePolicy rule with action {_RESTART_FREELY}")
    else:
        text = "0: the first preempted pod fails the whole set, which has no failurePolicy with maxRestarts"
        yield InjectWarning(f"{path}.backoffLimit", text)


def _ignores_preemption(rule: Fields) -> bool:
    codes = (rule.get("onExitCodes") or {}).get("values") or []
    conditions = [condition.get("type") for condition in rule.get("onPodConditions") or ()]
    return rule.get("action") == "Ignore" and (_PREEMPTED in codes or "DisruptionTarget" in conditions)


def _unshared(rules: list[Any]) -> list[Any]:
    """A copy in which nothing is shared: YAML would show shared parts as anchors."""
    return [copy.deepcopy(rule) for rule in rules]
