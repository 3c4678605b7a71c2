"""Preemptions must not count as failures: of a Job (``backoffLimit``) or of a JobSet (``maxRestarts``).

A preempted trainer saves and ends with exit code 143, and the cluster marks its pod with the condition ``DisruptionTarget``. A
``podFailurePolicy`` that ignores both is written where there is none and the API takes one. Policies that people wrote stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sidecar.kubernetes.inject.fields import Fields, growing, named, put, section
from sidecar.kubernetes.inject.pod_templates import PodTemplate
from sidecar.kubernetes.inject.pods import Pod
from sidecar.kubernetes.inject.reports import InjectWarning

_PREEMPTED = 143
_SETTING = "CKPT_PREEMPTED_EXIT_CODE"
_RESTART_FREELY = "RestartJobSetAndIgnoreMaxRestarts"
_BY_POLICY = "PodFailurePolicy"
"""Reason of a Job that failed by its podFailurePolicy."""
_RULES = ("preempted", "preempted_pods", "preempted_by_the_cluster")
"""Names of the set's rule: the first that no other rule has."""
_FAILS = ("FailJob", "FailIndex")
_DEFAULT_BACKOFF_LIMIT = 6
_MANY_RETRIES = 100
"""A ``backoffLimit`` from which preemptions may count."""
_PAUSE_S, _LONGEST_PAUSE_S = 10, 600
"""Pause of the Job controller before it replaces pods, after the first pod that ended, and its maximum. Source: Kubernetes,
``pkg/controller/job``, ``DefaultJobPodFailureBackOff`` and ``MaxJobPodFailureBackOff``."""


def _disrupted() -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True"}]


def preempted_exit_code(pod: Pod) -> int:
    """Return the exit code of a trainer that has saved just in time: the setting's, of this injection or of the manifest."""
    there = (named(pod.trainer.get("env") or [], _SETTING) or {}).get("value")
    said = str(pod.options.settings.get(_SETTING) or there or "")
    return int(said) if said.isdecimal() else _PREEMPTED


def put_failure_policy(pod: Pod) -> None:
    """Write the ``podFailurePolicy`` of a Job that may have one and has none.

    In a JobSet whose Jobs fail with their first pod (``backoffLimit: 0``) all pods begin anew together. That stays so for pods
    that are lost: the Job fails by its policy, and a rule of the set restarts it without counting.
    """
    job = pod.template.job
    if job is None or not _gets_policy(pod):
        return
    put(pod.spec, "restartPolicy", "Never", before=("securityContext", "initContainers", "containers"))
    ignored: dict[str, Any] = {"action": "Ignore", "onExitCodes": _exit_codes(pod)}
    if _may_be_old(pod):
        ignored["onPodConditions"] = []  # required by schemas before 1.29
    action = "Ignore"
    if _restarts_as_a_whole(pod):
        _put_set_rule(pod.template)
        action = "FailJob"
    rules = [{"action": action, "onPodConditions": _disrupted()}, ignored]
    put(job, "podFailurePolicy", {"rules": rules}, before=("podReplacementPolicy", "template"))


def _gets_policy(pod: Pod) -> bool:
    return _obstacle(pod) is None and preempted_exit_code(pod) != 0


def _obstacle(pod: Pod) -> str | None:
    """Return why no ``podFailurePolicy`` can be written into a pod's Job, by the rules of the API; ``None``: it can."""
    job, version = pod.template.job or {}, pod.options.kubernetes_version
    if "podFailurePolicy" in job:
        return f"no rule of the podFailurePolicy ignores exit code {preempted_exit_code(pod)} or DisruptionTarget"
    if version is not None and version < (1, 26):
        return "Kubernetes before 1.26 has no podFailurePolicy that ignores it"
    if job.get("podReplacementPolicy") not in (None, "Failed"):
        return f"podReplacementPolicy: {job['podReplacementPolicy']} allows no podFailurePolicy that ignores it"
    if _restart_policy(pod) != "Never":
        return f"restartPolicy: {_restart_policy(pod)} allows no podFailurePolicy that ignores it (Never does)"
    return None


def _restart_policy(pod: Pod) -> str:
    """Return the pod's restart policy. A JobSet writes OnFailure where there is none; ``Never`` is written instead.

    A classic sidecar that fails would not be started again by ``Never``.
    """
    there = pod.spec.get("restartPolicy")
    if there:
        return str(there)
    return "Never" if pod.template.kind.has_replicated_jobs and pod.options.is_native else "OnFailure"


def _restarts_as_a_whole(pod: Pod) -> bool:
    return pod.template.kind.has_replicated_jobs and (pod.template.job or {}).get("backoffLimit") == 0


def _may_be_old(pod: Pod) -> bool:
    version = pod.options.kubernetes_version
    return not pod.options.is_native if version is None else version < (1, 29)


def _exit_codes(pod: Pod) -> dict[str, Any]:
    return {"containerName": str(pod.trainer.get("name")), "operator": "In", "values": [preempted_exit_code(pod)]}


def _put_set_rule(template: PodTemplate) -> None:
    """Let the set restart without counting when the Job fails by its ``podFailurePolicy``.

    The rule stands in front of others, as the first that matches decides. Only the policy that is written here can make the Job
    fail so, which means that no other rule loses anything.
    """
    if _restarts_freely(template):
        return
    policy = section(_set_of(template), "failurePolicy", "spec", before=("replicatedJobs",))
    rules = growing(policy, "rules", "spec.failurePolicy")
    ours = next(filter(_is_ours, rules), None)
    if ours is not None:
        ours["targetReplicatedJobs"].append(template.name)
        return
    name = next(name for name in _RULES if named(rules, name) is None)
    rule = {"name": name, "action": _RESTART_FREELY, "onJobFailureReasons": [_BY_POLICY]}
    rules.insert(0, {**rule, "targetReplicatedJobs": [template.name]})


def _is_ours(rule: Fields) -> bool:
    is_free = rule.get("action") == _RESTART_FREELY and rule.get("onJobFailureReasons") == [_BY_POLICY]
    return rule.get("name") in _RULES and is_free and bool(rule.get("targetReplicatedJobs"))


def _set_of(template: PodTemplate) -> Fields:
    """Return the spec of the JobSet."""
    return template.above[-4]


def _restarts_freely(template: PodTemplate) -> bool:
    """Whether the set restarts without counting when one of its Jobs fails by its podFailurePolicy."""
    if not template.kind.has_replicated_jobs:
        return False
    for rule in (_set_of(template).get("failurePolicy") or {}).get("rules") or ():
        targets, reasons = rule.get("targetReplicatedJobs") or [template.name], rule.get("onJobFailureReasons")
        if template.name in targets and (not reasons or _BY_POLICY in reasons):
            return bool(rule.get("action") == _RESTART_FREELY)
    return False


def warnings_of_policies(pod: Pod) -> Iterator[InjectWarning]:
    """Yield warnings about policies and limits by which a preemption counts as a failure, or as a success."""
    job, path, code = pod.template.job, pod.template.job_path, preempted_exit_code(pod)
    if code == 0:
        text = f"{_SETTING} is 0: a preempted pod counts as succeeded, and the Job is complete before the training is"
        yield InjectWarning(f"{pod.trainer_path}.env", text)
    if job is None:
        return
    yield from _of_pauses(pod, job)
    rules = (job.get("podFailurePolicy") or {}).get("rules") or []
    failing = dict(_failing_rules(pod, rules, code))
    for index, rule in enumerate(rules):
        where = f"{path}.podFailurePolicy.rules[{index}]"
        if rule.get("onExitCodes") and "containerName" not in rule["onExitCodes"]:
            yield InjectWarning(f"{where}.onExitCodes", "without containerName it matches the sidecar's exit codes, too")
        if index in failing and not _restarts_freely(pod.template):
            yield InjectWarning(where, failing[index])
    if code != 0 and not failing:
        yield from _of_limits(pod, job, rules)


def _of_pauses(pod: Pod, job: Fields) -> Iterator[InjectWarning]:
    """Yield a warning about the pause before a preempted job of many pods begins again. No policy changes it.

    Of indices with limits of their own each pauses for itself.
    """
    pods = job.get("parallelism")
    is_indexed = pod.template.kind.has_replicated_jobs or job.get("completionMode") == "Indexed"
    if not isinstance(pods, int) or pods < 2 or not is_indexed or "backoffLimitPerIndex" in job or _restarts_as_a_whole(pod):
        return
    pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S << min(pods - 1, 10))
    text = (
        f"{pods}: Kubernetes may wait {pause_s} s before it makes the pods of a preempted job again: each pod that ended "
        f"doubles the pause, up to {_LONGEST_PAUSE_S} s; a JobSet with backoffLimit: 0 begins at once"
    )
    yield InjectWarning(f"{pod.template.job_path}.parallelism", text)


def _failing_rules(pod: Pod, rules: list[Fields], code: int) -> Iterator[tuple[int, str]]:
    """Yield the index of each rule that makes a preemption a failure of the Job, with what to do."""
    disrupted = _first_rule_of_disruptions(rules)
    if disrupted is not None and rules[disrupted].get("action") in _FAILS:
        text = "takes a pod that is preempted, evicted or drained for a failure: use action Ignore"
        yield disrupted, f"{rules[disrupted]['action']} {text}"
    index = _first_rule_of_exit_code(pod, rules, code)
    if index is not None and rules[index].get("action") in _FAILS:
        text = (
            f"{rules[index]['action']} also takes exit code {code}, the one of a trainer that saved and left, for a failure: "
            f"put a rule with action Ignore, containerName {pod.trainer.get('name')} and values [{code}] in front of it"
        )
        yield index, text


def _first_rule_of_exit_code(pod: Pod, rules: list[Fields], code: int) -> int | None:
    """Return the index of the rule that decides about the trainer's exit code, if there is one."""
    for index, rule in enumerate(rules):
        codes = rule.get("onExitCodes") or {}
        if not codes or codes.get("containerName") not in (None, pod.trainer.get("name")):
            continue
        if (code in (codes.get("values") or ())) == (codes.get("operator", "In") == "In"):
            return index
    return None


def _first_rule_of_disruptions(rules: list[Fields]) -> int | None:
    """Return the index of the rule that decides about pods that the cluster ends, if one speaks of them."""
    for index, rule in enumerate(rules):
        if any(condition.get("type") == "DisruptionTarget" for condition in rule.get("onPodConditions") or ()):
            return index
    return None


def _of_limits(pod: Pod, job: Fields, rules: list[Fields]) -> Iterator[InjectWarning]:
    """Yield a warning about the limit that preemptions use up, with the reason why no policy is written."""
    why = _obstacle(pod)
    if why is None:
        yield from _of_changes(pod)
        return
    field, fails, limit = _limit_of(pod, job)
    decided = (_first_rule_of_exit_code(pod, rules, preempted_exit_code(pod)), _first_rule_of_disruptions(rules))
    is_ignored = any(rules[index].get("action") == "Ignore" for index in decided if index is not None)
    if is_ignored or not isinstance(limit, int) or limit >= _MANY_RETRIES or _restarts_freely(pod.template):
        return
    policy = _set_of(pod.template).get("failurePolicy") or {} if pod.template.kind.has_replicated_jobs else {}
    if limit == 0 and policy.get("maxRestarts"):
        text = f"0: each preempted pod costs the set one of its {policy['maxRestarts']} restarts (maxRestarts): {why}"
    elif limit == 0:
        text = f"0: the first preempted pod fails the {fails}: {why}"
    else:
        text = f"each preemption counts as a failure, and the {fails} fails after {limit}: {why}"
    yield InjectWarning(f"{pod.template.job_path}.{field}", text)


def _limit_of(pod: Pod, job: Fields) -> tuple[str, str, Any]:
    """Return the field of the limit that preemptions use up first, what fails then, and its value."""
    whole = "whole set" if pod.template.kind.has_replicated_jobs and job.get("backoffLimit") == 0 else "job"
    each, limit = job.get("backoffLimitPerIndex"), job.get("backoffLimit")
    if isinstance(each, int) and (not isinstance(limit, int) or each < limit):
        return "backoffLimitPerIndex", "index", each  # without backoffLimit the Job has no other limit
    return "backoffLimit", whole, job.get("backoffLimit", _DEFAULT_BACKOFF_LIMIT)


def _of_changes(pod: Pod) -> Iterator[InjectWarning]:
    """Yield warnings about changes in the behaviour of a set by the policy that is written."""
    if _restarts_as_a_whole(pod) and not _restarts_freely(pod.template):
        text = (
            "0: a lost pod restarts the whole set; failurePolicy.rules says from now on that a preemption does not count "
            "against maxRestarts (JobSet 0.6 or later)"
        )
        yield InjectWarning(f"{pod.template.job_path}.backoffLimit", text)
    if "restartPolicy" not in pod.spec:
        text = (
            "Never is written, where JobSet would take OnFailure: only beside it a preemption need not count as a failure. A "
            "trainer that fails gets a new pod; OnFailure, written here, restarts it in its pod and counts preemptions"
        )
        yield InjectWarning(f"{pod.template.spec_path}.restartPolicy", text)
