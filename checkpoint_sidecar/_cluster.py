"""What the cluster of a notebook can do, asked by the SDK's own clients. Missing rights are a warning, not an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from sidecar.core.job.pods import SIDECAR
from sidecar.errors import ConfigurationError

log = logging.getLogger("checkpoint_sidecar")

_SCHEMA = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
_NEXT = (
    "ask the administrator for deploy/kubernetes/webhook of checkpoint-sidecar, or use a runtime with the sidecar "
    "('checkpoint-sidecar inject -f runtime.yaml') and durable(…, through='runtime')"
)


def is_kubernetes(backend: Any) -> bool:
    """Whether the SDK works with a cluster.

    Raises:
        ConfigurationError: The SDK is missing, or too old.
    """
    try:
        from kubeflow.trainer import options
        from kubeflow.trainer.backends.kubernetes.backend import KubernetesBackend
    except ModuleNotFoundError:
        raise ConfigurationError("the package kubeflow is missing: pip install 'checkpoint-sidecar[kubeflow]'") from None
    if not hasattr(options, "RuntimePatch"):
        raise ConfigurationError("this version of the package kubeflow has no runtime patches: pip install 'kubeflow>=0.5'")
    return isinstance(backend, KubernetesBackend)


def check_trainer(backend: Any) -> None:
    """Check that the cluster's Trainer knows ``runtimePatches``: an older one drops them without a word.

    Raises:
        ConfigurationError: It does not.
    """
    from kubernetes.client import ApiException

    try:
        schema = _api(backend).call_api(
            _SCHEMA, "GET", auth_settings=["BearerToken"], response_type="object", _return_http_data_only=True
        )
    except ApiException as error:
        log.warning("not checked whether Kubeflow Trainer knows runtimePatches: %s", _reason(error))
        return
    if "runtimePatches" not in json.dumps(schema):
        raise ConfigurationError(
            "this cluster's Kubeflow Trainer is older than 2.2 and would ignore durable: upgrade it, or apply a TrainJob with "
            "podTemplateOverrides that 'checkpoint-sidecar inject' has changed (deploy/kubernetes/trainjob-2.1.yaml)"
        )


def check_webhook(backend: Any, patch: Mapping[str, Any]) -> None:
    """Have the API server admit a pod with the patch's label and annotations, without creating it.

    Raises:
        ConfigurationError: The webhook is missing, does not answer, or refuses the options.
    """
    from kubernetes.client import ApiException, CoreV1Api

    [metadata, *_] = [
        job["template"]["spec"]["template"]["metadata"]
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    ]
    try:
        made = CoreV1Api(_api(backend)).create_namespaced_pod(backend.namespace, _dry_pod(metadata), dry_run="All")
    except ApiException as error:
        reason = _reason(error)
        if "checkpoint-sidecar: " in reason:
            raise ConfigurationError(f"the webhook refuses it: {reason.partition('checkpoint-sidecar: ')[2]}") from None
        if "failed calling webhook" in reason:
            raise ConfigurationError(f"the webhook does not answer, and pods would not start: {reason}") from None
        log.warning("not checked whether a webhook adds the sidecar, progress(job) will say it: %s", reason)
        return
    containers = [*(made.spec.init_containers or ()), *made.spec.containers]
    if not any(container.name == SIDECAR for container in containers):
        raise ConfigurationError(f"no webhook of namespace {backend.namespace} adds the sidecar: {_NEXT}")


def _dry_pod(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod like a TrainJob's, which passes the restricted pod security standard."""
    labels = metadata["labels"] | {"jobset.sigs.k8s.io/jobset-name": "durable-check"}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    security |= {"seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "durable-check-", "labels": labels, "annotations": metadata["annotations"]},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "node", "image": "none", "securityContext": security}]},
    }


def _api(backend: Any) -> Any:
    """Return a client of its own: executing commands changes the client, and the SDK's is shared."""
    from kubernetes.client import ApiClient

    return ApiClient(backend.core_api.api_client.configuration)


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def exec_json(backend: Any, pod: str, *command: str, timeout_s: float) -> tuple[dict[str, Any] | None, str | None]:
    """Return the JSON answer of a command in a pod's sidecar, or ``None`` and why there is none."""
    from kubernetes.client import ApiException, CoreV1Api
    from kubernetes.stream import stream
    from urllib3.exceptions import HTTPError

    call = CoreV1Api(_api(backend)).connect_get_namespaced_pod_exec
    try:
        connection = stream(
            call,
            pod,
            backend.namespace,
            container=SIDECAR,
            command=[SIDECAR, *command],
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
            _request_timeout=timeout_s,
        )
    except (ApiException, HTTPError, OSError) as error:
        return None, _reason(error) if isinstance(error, ApiException) else str(error)
    try:
        connection.run_forever(timeout=timeout_s)
        printed = connection.read_all()
    except OSError as error:
        return None, str(error)
    finally:
        connection.close()
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return None, printed.strip()[-200:] or f"no answer within {timeout_s:g} s"
    return (None, str(answer["error"])) if "error" in answer and "phase" not in answer else (answer, None)
