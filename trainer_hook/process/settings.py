"""The hook's settings: read once from the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook.contract import DEFAULT_API_PORT, DEFAULT_DIR, PREEMPTED_EXIT_CODE, ContractError, check_settings
from trainer_hook.process.switches import FALSE, TRUE


class SettingError(ValueError):
    """An unknown or invalid ``CKPT_*`` variable; the text names it and its valid values."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the variable ``CKPT_<FIELD>``."""

    dir: Path = Path(DEFAULT_DIR)
    """The shared volume."""
    save_strategy: str = "minutes"
    """When to save, in addition to the script: ``steps``, ``epoch``, ``minutes`` or ``no``."""
    save_steps: int = 500
    """Save interval in steps; setting it without ``CKPT_SAVE_MINUTES`` implies ``CKPT_SAVE_STRATEGY=steps``."""
    save_minutes: float = 10.0
    """Save interval in minutes."""
    save_total_limit: int | None = None
    """Number of its own checkpoints that the hook keeps on the volume. None: the sidecar deletes durable ones."""
    jit: bool = True
    """Save just in time at a termination notice."""
    asynchronous: bool = False
    """Periodic saves hold training only for a snapshot in host memory, which another process writes. For Trainer, Accelerate
    and Lightning in one process or with DDP; ``Checkpointer`` also with sharded models. Otherwise (FSDP of these libraries,
    DeepSpeed, ``plain``) saves block. Each rank that saves needs memory for a copy of its part and 0.4 GB; without it a save
    blocks, and the log says so."""
    resume_timeout_s: float = 600.0
    """Longest wait in seconds for a checkpoint to resume from. If a node does not have it by then, no older one of the store
    is tried."""
    sidecar_url: str = f"http://127.0.0.1:{DEFAULT_API_PORT}"
    """URL of the sidecar."""
    fail_without_store: bool = False
    """Reaction if a checkpoint is, or may be, in the store but is not available. continue: from the newest on the volume, else
    from scratch, logged in capitals. fail: exit."""
    preempted_exit_code: int = PREEMPTED_EXIT_CODE
    """Exit code after a just-in-time save."""
    grace_seconds: float = 30.0
    """Copy of the pod's terminationGracePeriodSeconds."""


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Variables that are set but empty count as not set.

    Raises ``SettingError``: one line that names the variable and its valid values.
    """
    given = {name: value.strip() for name, value in environ.items() if name.startswith("CKPT_") and value.strip()}
    try:
        check_settings(given)
    except ContractError as error:
        raise SettingError(str(error)) from None
    read: dict[str, Any] = {}
    for field, (name, parse) in _VARIABLES.items():
        if name in given:
            try:
                read[field] = parse(given[name])
            except ValueError as error:
                raise SettingError(f"{name}={given[name]!r} must be {error}") from None
    if "save_steps" in read and "save_minutes" not in read:
        read.setdefault("save_strategy", "steps")
    if (port := read.pop("api_port", None)) is not None:
        read.setdefault("sidecar_url", f"http://127.0.0.1:{port}")
    return Settings(**read)


def ignored_setting(environ: Mapping[str, str]) -> str | None:
    """Return why a setting has no effect beside another one; ``None``: each has."""
    given = {name for name in ("CKPT_SAVE_STEPS", "CKPT_SAVE_MINUTES", "CKPT_SAVE_STRATEGY") if environ.get(name, "").strip()}
    if given != {"CKPT_SAVE_STEPS", "CKPT_SAVE_MINUTES"}:
        return None
    return "CKPT_SAVE_STEPS has no effect: CKPT_SAVE_MINUTES is set, too; CKPT_SAVE_STRATEGY=steps chooses the former"


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        wanted = f"a whole number from {least} on" if most is None else f"a whole number from {least} to {most}"
        if not text.isascii() or not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(wanted)
        return int(text)

    return parse


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError("a number greater than 0")
    return value


def _truth(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError("true or false")
    return text.lower() in TRUE


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return parse


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("a URL such as http://127.0.0.1:9470")
    return text.rstrip("/")


def _is_fail(text: str) -> bool:
    return _one_of("continue", "fail")(text) == "fail"


def _absolute(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError("an absolute path")
    return Path(text)


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "api_port": ("CKPT_API_PORT", _whole(1, 65535)),
    "dir": ("CKPT_DIR", _absolute),
    "save_strategy": ("CKPT_SAVE_STRATEGY", _one_of("steps", "epoch", "minutes", "no")),
    "save_steps": ("CKPT_SAVE_STEPS", _whole(1)),
    "save_minutes": ("CKPT_SAVE_MINUTES", _number),
    "save_total_limit": ("CKPT_SAVE_TOTAL_LIMIT", _whole(1)),
    "jit": ("CKPT_JIT", _truth),
    "asynchronous": ("CKPT_ASYNC", _truth),
    "resume_timeout_s": ("CKPT_RESUME_TIMEOUT_S", _number),
    "sidecar_url": ("CKPT_SIDECAR_URL", _url),
    "fail_without_store": ("CKPT_ON_STORE_FAILURE", _is_fail),
    "preempted_exit_code": ("CKPT_PREEMPTED_EXIT_CODE", _whole(0, 255)),
    "grace_seconds": ("CKPT_GRACE_SECONDS", _number),
}
"""By field of ``Settings``, and ``api_port``: the variable, and its parser, whose ``ValueError`` names the valid values."""
