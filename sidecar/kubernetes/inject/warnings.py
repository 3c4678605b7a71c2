"""Warnings about a pod that gets a sidecar. Each check is one function of what the document says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.exit_codes import ends_before_trainer, ends_otherwise, keeps_signals, swallowed
from sidecar.kubernetes.inject.fields import Fields, at, is_true, metadata_of, named
from sidecar.kubernetes.inject.options import DEFAULT_IMAGE
from sidecar.kubernetes.inject.pods import Pod, our_container
from sidecar.kubernetes.inject.preemption import warnings_of_policies
from sidecar.kubernetes.inject.recalled import store_in
from sidecar.kubernetes.inject.reports import InjectWarning
from sidecar.kubernetes.inject.resources import warning_of_pod_level
from sidecar.kubernetes.inject.shell import Shell, shell_of
from sidecar.kubernetes.inject.trainer import warning_of_guess
from sidecar.kubernetes.inject.volumes import warnings_of_mounts
from sidecar.kubernetes.inject.workload import (
    ends_training_at_sigterm,
    has_groups,
    is_of_mpi,
    is_of_workload,
    names_each_run,
    owner_of_pod,
)
from trainer_hook.contract import DEFAULT_API_PORT

Check = Callable[[Pod], Iterator[InjectWarning]]
_KUBEFLOW_V1 = "kubeflow.org"


def warnings_of(pod: Pod) -> list[InjectWarning]:
    """Return all warnings about a pod, in the order of its life."""
    return [*warning_of_guess(pod.template, pod.options), *(warning for check in _CHECKS for warning in check(pod))]


def _grace(pod: Pod) -> Iterator[InjectWarning]:
    if "terminationGracePeriodSeconds" not in pod.spec and pod.options.grace is None:
        text = "is not set: Kubernetes gives 30 s from SIGTERM to the end, for the save and its upload; choose it with --grace"
        yield InjectWarning(f"{pod.template.spec_path}.terminationGracePeriodSeconds", text)


def _volume(pod: Pod) -> Iterator[InjectWarning]:
    path, shared = pod.template.spec_path, pod.shared
    if shared.mount is None and shared.name == made.VOLUME_BESIDE:
        text = (
            f"the pod has a volume {made.VOLUME!r} that the trainer does not mount at {shared.directory}: the shared one is "
            f"called {shared.name}; if checkpoints go to the former, give its mount path with --dir"
        )
        yield InjectWarning(f"{path}.volumes", text)
    yield from warnings_of_mounts(pod.trainer, pod.trainer_path, shared)
    for key in ("subPath", "subPathExpr"):
        if key in (shared.mount or {}):
            text = (
                f"a sub-path is a mount of its own, across which links and renames fail: mount the whole at {shared.directory}"
            )
            yield InjectWarning(f"{pod.trainer_path}.volumeMounts", f"{key}: {text}")
    empty = (shared.volume or {}).get("emptyDir") or {}
    if "sizeLimit" in empty:
        text = "beyond it the pod is evicted with a second's notice, where the trainer would survive a full disk: leave it out"
        yield InjectWarning(f"{path}.volumes", f"{shared.name}: sizeLimit: {text}")
    if empty.get("medium") == "Memory":
        yield InjectWarning(
            f"{path}.volumes", f"{shared.name}: checkpoints in memory count against the containers' memory limits"
        )
    # A JobSet makes one claim for all of its pods.
    is_of_all = shared.is_claim_template and pod.template.kind.has_replicated_jobs
    if (is_of_all or "persistentVolumeClaim" in (shared.volume or {})) and (pod.nodes.count or 1) > 1:
        text = (
            "several pods share the claim, but one sidecar at a time uses a volume: give each an emptyDir or ephemeral volume"
        )
        yield InjectWarning(f"{path}.volumes", f"{shared.name}: {text}")


def _ephemeral_storage(pod: Pod) -> Iterator[InjectWarning]:
    on_node = pod.shared.volume is None or "emptyDir" in pod.shared.volume
    for index, container in enumerate(pod.spec.get("containers") or ()):
        limits = (container.get("resources") or {}).get("limits") or {}
        if on_node and "ephemeral-storage" in limits:
            text = "checkpoints on the emptyDir count against it, and beyond it the pod is evicted with a second's notice"
            yield InjectWarning(f"{pod.template.spec_path}.containers[{index}].resources.limits.ephemeral-storage", text)


def _pod_level(pod: Pod) -> Iterator[InjectWarning]:
    ours = made.resources_of(pod.spec, pod.options, our_container(pod))
    yield from warning_of_pod_level(pod.spec, pod.template.spec_path, sidecar=ours, name=made.SIDECAR)


def _user(pod: Pod) -> Iterator[InjectWarning]:
    own, common = pod.trainer.get("securityContext") or {}, pod.spec.get("securityContext") or {}
    user = own.get("runAsUser", common.get("runAsUser")) if pod.options.run_as_user is None else pod.options.run_as_user
    where = f"{pod.template.spec_path}.securityContext"
    if user == 0:
        yield InjectWarning(
            where, "the trainer is root, so the sidecar is, too (without capabilities): the restricted standard forbids both"
        )
    elif user is None and "fsGroup" not in common:
        text = (
            "the trainer's user is not known here: give the sidecar the same with --run-as-user, unless the platform gives all "
            "containers one (OpenShift does); another user cannot clean up the volume"
        )
        yield InjectWarning(where, text)


def _network(pod: Pod) -> Iterator[InjectWarning]:
    path, ports = pod.template.spec_path, {pod.options.api_port or DEFAULT_API_PORT, pod.options.metrics_port}
    if is_true(pod.spec.get("hostNetwork")):
        numbers = ", ".join(str(port) for port in sorted(filter(None, ports)))
        text = f"{numbers}: taken on the node itself, so that two such pods on one node clash; choose another with --api-port"
        yield InjectWarning(f"{path}.hostNetwork", text)
    for index, container in enumerate(pod.spec.get("containers") or ()):
        for number, port in enumerate(container.get("ports") or () if container.get("name") != made.SIDECAR else ()):
            if port.get("containerPort") in ports:
                text = f"{port['containerPort']} is the sidecar's: choose another with --api-port or --metrics-port"
                yield InjectWarning(f"{path}.containers[{index}].ports[{number}]", text)


def _restart(pod: Pod) -> Iterator[InjectWarning]:
    path, policy, native = pod.template.spec_path, pod.spec.get("restartPolicy"), pod.options.is_native
    is_lone = pod.template.kind.name == "Pod" and owner_of_pod(metadata_of(pod.template.document)) is None
    if is_lone and policy in (None, "Always"):
        yield InjectWarning(
            f"{path}.restartPolicy", "Always: a training that has succeeded is started again; use OnFailure or Never"
        )
    elif not native and policy in (None, "Always") and pod.template.kind.group != "apps":
        yield InjectWarning(
            f"{path}.restartPolicy", "Always: the classic sidecar ends after a success and is started again; use OnFailure"
        )
    version = pod.options.kubernetes_version
    if native and policy == "Never" and version is not None and version < (1, 33):
        text = (
            "Never: on this version a sidecar that fails before it has started leaves the pod waiting for ever; look at its log"
        )
        yield InjectWarning(f"{path}.restartPolicy", text)
    if native and version is not None and version < (1, 29):
        yield InjectWarning(
            f"{path}.initContainers", "native sidecars need 1.29, or the feature gate SidecarContainers in 1.28"
        )
    if native and pod.template.kind.group == _KUBEFLOW_V1:
        field = (
            f"{pod.template.kind.name.lower()}.{pod.template.kind.pods[0].replace('{}', '')}.spec.initContainers.restartPolicy"
        )
        text = (
            "an operator whose CRD does not know restartPolicy here drops it, and the API server refuses the pod's probes: "
            f"see 'kubectl explain {field}', else use --mode classic"
        )
        yield InjectWarning(f"{path}.initContainers", text)


def _replica(pod: Pod) -> Iterator[InjectWarning]:
    if pod.template.kind.group == _KUBEFLOW_V1 and pod.template.above[-1].get("restartPolicy") == "Never":
        text = "Never: a preempted replica (exit code 143) is not started again; use ExitCode or OnFailure"
        yield InjectWarning(f"{pod.template.job_path}.restartPolicy", text)
    limit = "spec.runPolicy.backoffLimit"
    if pod.template.kind.group == _KUBEFLOW_V1 and at(pod.template.document, limit) == 0:
        yield InjectWarning(limit, "0: the first preempted pod (exit code 143) fails the whole job: raise it, or leave it out")


def _job(pod: Pod) -> Iterator[InjectWarning]:
    job = pod.template.job if pod.template.kind.group == "batch" else None
    if job is not None and job.get("completionMode") != "Indexed" and (pod.nodes.count or 1) > 1:
        text = "several pods without an index write to one prefix: use completionMode: Indexed"
        yield InjectWarning(f"{pod.template.job_path}.completionMode", text)
    if pod.template.kind.name in ("Deployment", "ReplicaSet") and (pod.nodes.count or 1) > 1:
        text = "several pods without an index write to one prefix, as one run: use 1, a StatefulSet, or an indexed Job"
        yield InjectWarning("spec.replicas", text)


def _rollout(pod: Pod) -> Iterator[InjectWarning]:
    strategy = pod.template.above[-1].get("strategy") or {} if pod.template.above else {}
    if pod.template.kind.name == "Deployment" and strategy.get("type") != "Recreate":
        text = "a rollout starts the next pod while the last one still trains: use type: Recreate"
        yield InjectWarning(pod.template.job_path + ".strategy", text)


def _hook(pod: Pod) -> Iterator[InjectWarning]:
    env = pod.trainer.get("env") or []
    words = [str(word) for key in ("command", "args") for word in pod.trainer.get(key) or ()]
    has_hook = named(env, "CKPT_HOOK") is not None or any("trainer_hook" in word for word in words)
    if not pod.options.install_hook and not has_hook:
        text = "nothing here starts the hook: unless the image does, or a script writes .complete itself, use --install-hook"
        yield InjectWarning(pod.trainer_path, text)
    if pod.options.install_hook and named(env, "PYTHONPATH") is None:
        text = "is set for the hook and replaces the image's: if it has one, write that into the trainer's env before inject"
        yield InjectWarning(f"{pod.trainer_path}.env", f"PYTHONPATH {text}")
    init = pod.spec.get("initContainers") or []
    keeps_image = pod.options.image is None and our_container(pod) is not None
    if keeps_image and pod.options.is_native and named(init, made.HOOK) is not None:
        text = (
            f"{made.HOOK} goes: the sidecar installs the hook itself, if its image is of this version; give that with --image"
        )
        yield InjectWarning(f"{pod.template.spec_path}.initContainers", text)
    if pod.options.install_hook and is_of_mpi(pod.template):
        text = "ranks that mpirun starts on other pods get the hook only with '-x PYTHONPATH -x CKPT_HOOK -x CKPT_DIR'"
        yield InjectWarning(pod.trainer_path, text)


def _pre_stop(pod: Pod) -> Iterator[InjectWarning]:
    there = (pod.trainer.get("lifecycle") or {}).get("preStop")
    if ends_training_at_sigterm(pod.template) and there and there != made.PRE_STOP_OF_TRAINER:
        text = "stays as it is, and the training ends with it or at SIGTERM: without it one is written that waits for the save"
        yield InjectWarning(f"{pod.trainer_path}.lifecycle.preStop", text)


def _shell(pod: Pod) -> Iterator[InjectWarning]:
    is_shared = is_true(pod.spec.get("shareProcessNamespace"))
    yield from warnings_of_shell(pod.trainer, pod.trainer_path, is_shared=is_shared)
    kind, entry = pod.template.kind, pod.template.path.partition(".rayClusterSpec")[0] + ".entrypoint"
    script = at(pod.template.document, entry) if kind.name in ("RayJob", "RayCronJob") else None
    if isinstance(script, str):  # the submitter gives it to a shell
        yield from _of_script(Shell(script, frozenset()), entry, gets_signals=False)


def warnings_of_shell(
    container: Fields, path: str, *, gets_signals: bool = True, is_shared: bool = False
) -> Iterator[InjectWarning]:
    """Yield warnings about the shell of a container's command: lost exit codes, and SIGTERM that stays with the shell.

    ``is_shared``: the containers of the pod have one namespace of processes.
    """
    words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
    shell = shell_of(words)
    if shell is not None:
        where = f"{path}.{'args' if container.get('args') else 'command'}"
        yield from _of_script(shell, where, gets_signals=gets_signals)
        if gets_signals and ends_before_trainer(shell, words, is_shared=is_shared):
            text = (
                "SIGTERM may end the shell, which is not PID 1, and with it the trainer, unsaved: begin its command with 'exec'"
            )
            yield InjectWarning(where, text)


def _of_script(shell: Shell, where: str, *, gets_signals: bool) -> Iterator[InjectWarning]:
    reason = swallowed(shell) or ends_otherwise(shell)
    if reason is not None:
        text = (
            f"the shell does not end with the trainer's exit code: {reason}. A preempted run then counts as succeeded, or as "
            "failed: begin the trainer's command with 'exec' and put nothing behind it; for a log as well, bash: "
            "'exec > >(tee log) 2>&1' on a line before it, or 'set -o pipefail'"
        )
        yield InjectWarning(where, text)
    if gets_signals and keeps_signals(shell):
        yield InjectWarning(where, "a shell with several commands may keep SIGTERM to itself: begin the last one with 'exec'")


def _name(pod: Pod) -> Iterator[InjectWarning]:
    # A controller gives its pods such names, and their run has its name or that of a label.
    if pod.template.kind.name != "Pod" or not is_of_workload(metadata_of(pod.template.document)):
        yield from warning_of_name(pod.template.document, _store_of(pod))


def warning_of_name(document: Fields, store: str) -> Iterator[InjectWarning]:
    """Yield a warning about a prefix that all runs of a ``generateName`` share."""
    metadata = metadata_of(document)
    if metadata.get("generateName") and not metadata.get("name") and not names_each_run(store):
        text = "all that is made from this has one prefix, which is the first one's: give each its own --store"
        yield InjectWarning("metadata.generateName", text)


def _several_runs(pod: Pod) -> Iterator[InjectWarning]:
    """Yield a warning about a prefix that all runs of one document share."""
    kind = pod.template.kind
    if names_each_run(_store_of(pod)):
        if kind.name == "RayCronJob":
            text = (
                "only its cluster's name tells a run from others, so it is the prefix: a retry with a new cluster begins anew"
            )
            yield InjectWarning("spec.jobTemplate.backoffLimit", text)
        return
    if kind.group == "trainer.kubeflow.org":
        text = "all TrainJobs of the runtime have one prefix, and only one at a time may write there: put {name} into --store"
        yield InjectWarning("metadata.name", f"{text}, or give each TrainJob its own by inject")
    elif kind.name == "PodTemplate":
        yield InjectWarning("metadata.name", "all pods that are made from it have one prefix: give each its own --store")
    elif kind.name in ("CronJob", "RayCronJob"):
        text = "all runs of the schedule have one prefix, so each resumes the last one, even when that has finished"
        yield InjectWarning("spec.schedule", f"{text}: put {{name}} into --store unless that is meant")
        if at(pod.template.document, "spec.concurrencyPolicy") in (None, "Allow"):
            text = "two runs at once would write to one prefix: use Forbid or Replace"
            yield InjectWarning("spec.concurrencyPolicy", text)
    elif kind.name == "LeaderWorkerSet" and has_groups(pod.template.document):
        text = "each group is a run of its own and needs its own prefix: put {name} into --store"
        yield InjectWarning("spec.replicas", text)


def _store_of(pod: Pod) -> str:
    return pod.options.store or store_in(pod.spec) or ""


def _credentials(pod: Pod) -> Iterator[InjectWarning]:
    secret = pod.options.secret
    for index, source in enumerate(pod.trainer.get("envFrom") or ()):
        if secret and (source.get("secretRef") or {}).get("name") == secret:
            yield InjectWarning(
                f"{pod.trainer_path}.envFrom[{index}]", "the trainer needs no credentials for checkpoints any more"
            )


def _access(pod: Pod) -> Iterator[InjectWarning]:
    store, ours, options = _store_of(pod), our_container(pod) or {}, pod.options
    known = {str(entry.get("name")) for entry in ours.get("env") or ()}
    if options.secret or not store.startswith("s3://") or ours.get("envFrom") or "CKPT_CREDENTIALS_DIR" in known:
        return
    where = f"{pod.template.spec_path}.{'initContainers' if options.is_native else 'containers'}"
    if not options.cloud_identity and not pod.spec.get("serviceAccountName") and "AWS_ACCESS_KEY_ID" not in known:
        yield InjectWarning(where, "nothing here gives the sidecar credentials: use --secret or --cloud-identity")
    if store.startswith("s3:///") and "AWS_S3_BUCKET" not in known:
        yield InjectWarning(
            where, f"the bucket of {store} would come from a Secret, and none is named: --secret, or s3://bucket/…"
        )


def _image(pod: Pod) -> Iterator[InjectWarning]:
    if pod.options.image is None and our_container(pod) is None:
        yield InjectWarning(
            f"{pod.template.spec_path}.initContainers", f"the image is {DEFAULT_IMAGE}: name your registry's with --image"
        )


_CHECKS: tuple[Check, ...] = (
    *(_image, _name, _grace, _volume, _ephemeral_storage, _pod_level, _user, _access, _credentials, _network),
    *(_several_runs, _restart, _replica, _job, warnings_of_policies, _rollout, _hook, _pre_stop, _shell),
)
