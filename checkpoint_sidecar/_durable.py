"""``durable``: an option of the SDK's ``train`` that adds sidecar and hook to the pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from checkpoint_sidecar import _cluster
from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.notebook import runtime_patch, store_options, webhook_patch

_NAMES = {"secret": "data_connection", "keep-store": "keep", "save-steps": "save_steps", "save-minutes": "save_minutes"}
"""Options of ``inject`` and their names here."""


@dataclass(frozen=True, slots=True)
class Durable:
    """An option of ``TrainerClient.train``; made by ``durable``."""

    given: Mapping[str, str]
    """Options of ``checkpoint-sidecar inject``, by the name of their flag."""
    through: Literal["webhook", "runtime"]
    pods: tuple[str, ...]
    check: bool

    def __call__(self, job_spec: dict[str, Any], trainer: Any, backend: Any) -> None:
        """Add the patch to the TrainJob that the SDK makes.

        Raises:
            ConfigurationError: The cluster, its webhook or the trainer cannot have it; the text has the next step.
        """
        if not _cluster.is_kubernetes(backend):
            raise ConfigurationError(
                f"durable needs a cluster, not {type(backend).__name__}: without one, run 'checkpoint-sidecar run' beside it"
            )
        by_webhook = self.through == "webhook"
        patch = webhook_patch(self.given, self.pods) if by_webhook else self._of_runtime(job_spec, trainer)
        if self.check:
            _cluster.check_trainer(backend)
            if by_webhook:
                _cluster.check_webhook(backend, patch)
        job_spec.setdefault("spec", {}).setdefault("runtimePatches", []).append(patch)

    def _of_runtime(self, job_spec: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
        nodes = getattr(trainer, "num_nodes", None)
        name = (job_spec.get("metadata") or {}).get("name")
        patch, variables = runtime_patch(self.given, self.pods, nodes=nodes, name=name)
        if variables:
            if trainer is None or not hasattr(trainer, "env"):
                raise ConfigurationError(
                    f"{', '.join(variables)} cannot be set: {type(trainer).__name__} takes no environment; use CustomTrainer, "
                    "set them in the runtime, or through='webhook'"
                )
            trainer.env = {**(trainer.env or {}), **variables}
        return patch


def durable(
    *,
    store: str,
    data_connection: str | None = None,
    save_steps: int | None = None,
    save_minutes: int | None = None,
    jit: bool = True,
    keep: int | None = None,
    grace: str | int | None = None,
    settings: Mapping[str, object] | None = None,
    through: Literal["webhook", "runtime"] = "webhook",
    pods: tuple[str, ...] = ("node",),
    check: bool = True,
) -> Durable:
    """Return an option for ``TrainerClient.train(options=[…])`` that makes the training durable.

    Args:
        store: ``s3://bucket/prefix`` (``s3:///prefix``: the bucket of the data connection) or ``pvc://claim/folder``.
            ``{name}`` and ``{namespace}`` are the TrainJob's. One run has one prefix; the SDK invents a name for each
            TrainJob unless the option ``Name`` gives it one, so a run that a later ``train`` shall continue needs a fixed
            prefix or a fixed name.
        data_connection: Secret with ``AWS_*`` keys, mounted in the sidecar alone; ``None``: the webhook's default.
        save_steps: Save interval in steps; ``None``: the hook's default.
        save_minutes: Save interval in minutes, instead.
        jit: Save at a termination notice.
        keep: Checkpoints left in the store; ``None``: all.
        grace: The pod's grace period, seconds or such as ``"2m"``; ``None``: the runtime's.
        settings: Further ``CKPT_*`` settings of hook and sidecar.
        through: Where the sidecar comes from: the webhook, or a runtime that ``checkpoint-sidecar inject`` has changed.
        pods: The runtime's replicated jobs that train.
        check: Ask the cluster first whether it can do it; needs the right to create pods, else it is left out with a warning.

    Raises:
        ConfigurationError: An argument is not valid, or ``through="runtime"`` cannot do it.
    """
    if through not in ("webhook", "runtime"):
        raise ConfigurationError(f"through={through!r} must be 'webhook' or 'runtime'")
    if save_steps is not None and save_minutes is not None:
        raise ConfigurationError("save_steps and save_minutes are two intervals: choose one")
    given = store_options(store) | {
        name: str(value)
        for name, value in (
            ("secret", data_connection),
            ("save-steps", save_steps),
            ("save-minutes", save_minutes),
            ("save-strategy", None if save_minutes is None else "minutes"),
            ("jit", None if jit else "false"),
            ("keep-store", keep),
            ("grace", grace),
            ("install-hook", "true" if through == "webhook" else None),
        )
        if value is not None
    }
    made = Durable(given | _settings(settings or {}), through, tuple(pods), check)
    if through == "runtime":
        _check_runtime(given)
    _check_options(made)
    return made


def _settings(settings: Mapping[str, object]) -> dict[str, str]:
    for name in settings:
        if not name.startswith("CKPT_"):
            raise ConfigurationError(f"settings: {name!r} is none of hook or sidecar, which begin with CKPT_")
    return {name: str(value) for name, value in settings.items()}


def _check_runtime(given: Mapping[str, str]) -> None:
    for name, argument in (("secret", "data_connection"), ("claim", "a pvc:// store")):
        if name in given:
            raise ConfigurationError(
                f"{argument} cannot be given through='runtime': a TrainJob cannot add volumes of the sidecar; "
                f"'checkpoint-sidecar inject --{name}' puts it into the runtime, or use through='webhook'"
            )


def _check_options(made: Durable) -> None:
    """Check the options now, not when the job starts."""
    try:
        webhook_patch(made.given, made.pods)
    except ConfigurationError as error:
        text = str(error)
        name = text.partition("=")[0]
        raise ConfigurationError(_NAMES.get(name, name) + text[len(name) :]) from None
