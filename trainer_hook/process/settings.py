"""The hook's settings: read once from the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer_hook.contract import DEFAULT_API_PORT, DEFAULT_DIR, PREEMPTED_EXIT_CODE, ContractError, check_settings

T = TypeVar("T")

STRATEGIES = ("steps", "epoch", "minutes", "no")
DEFAULT_MINUTES = 10.0
DEFAULT_STEPS = 500


class SettingError(ValueError):
    """A ``CKPT_*`` variable that is not known or not valid; the text names it and says what it may be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the variable ``CKPT_<FIELD>``."""

    dir: Path = Path(DEFAULT_DIR)
    """The shared volume."""
    save_strategy: str = "minutes"
    """When to save, besides what the script itself saves: ``steps``, ``epoch``, ``minutes`` or ``no``."""
    save_steps: int = DEFAULT_STEPS
    save_minutes: float = DEFAULT_MINUTES
    save_total_limit: int | None = None
    """How many of its own checkpoints the hook leaves on the volume; unset: the sidecar deletes what is durable."""
    jit: bool = True
    """Save just in time when the pod is going."""
    asynchronous: bool = False
    """``CKPT_ASYNC``: training is held only until there is a snapshot, which another process writes."""
    resume_timeout_s: float = 600.0
    """Longest wait for a checkpoint to resume from."""
    sidecar_url: str = f"http://127.0.0.1:{DEFAULT_API_PORT}"
    fail_without_store: bool = False
    """``CKPT_ON_STORE_FAILURE=fail``: exit rather than train without what is in the store."""
    preempted_exit_code: int = PREEMPTED_EXIT_CODE
    grace_seconds: float = 30.0
    """Copy of the pod's terminationGracePeriodSeconds."""


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Variables that are set but empty count as not set.

    Raises:
        SettingError: One line that names the variable and what it may be.
    """
    given = {name: value.strip() for name, value in environ.items() if name.startswith("CKPT_") and value.strip()}
    try:
        check_settings(given)
    except ContractError as error:
        raise SettingError(str(error)) from None
    port = _read(given, "CKPT_API_PORT", _whole(1, 65535), DEFAULT_API_PORT)
    folder = Path(given.get("CKPT_DIR", DEFAULT_DIR))
    if not folder.is_absolute():
        raise SettingError(f"CKPT_DIR={folder} must be an absolute path")
    return Settings(
        dir=folder,
        save_strategy=_read(given, "CKPT_SAVE_STRATEGY", _one_of(*STRATEGIES), _implied_strategy(given)),
        save_steps=_read(given, "CKPT_SAVE_STEPS", _whole(1), DEFAULT_STEPS),
        save_minutes=_read(given, "CKPT_SAVE_MINUTES", _number, DEFAULT_MINUTES),
        save_total_limit=_read(given, "CKPT_SAVE_TOTAL_LIMIT", _whole(1), None),
        jit=_read(given, "CKPT_JIT", _truth, True),
        asynchronous=_read(given, "CKPT_ASYNC", _truth, False),
        resume_timeout_s=_read(given, "CKPT_RESUME_TIMEOUT_S", _number, 600.0),
        sidecar_url=_read(given, "CKPT_SIDECAR_URL", _url, f"http://127.0.0.1:{port}"),
        fail_without_store=_read(given, "CKPT_ON_STORE_FAILURE", _one_of("continue", "fail"), "continue") == "fail",
        preempted_exit_code=_read(given, "CKPT_PREEMPTED_EXIT_CODE", _whole(0, 255), PREEMPTED_EXIT_CODE),
        grace_seconds=_read(given, "CKPT_GRACE_SECONDS", _number, 30.0),
    )


def _implied_strategy(given: Mapping[str, str]) -> str:
    return "steps" if "CKPT_SAVE_STEPS" in given and "CKPT_SAVE_MINUTES" not in given else "minutes"


def _read(given: Mapping[str, str], name: str, parse: Callable[[str], Any], default: T) -> T:
    if name not in given:
        return default
    try:
        parsed: T = parse(given[name])
    except ValueError as error:
        raise SettingError(f"{name}={given[name]!r} must be {error}") from None
    return parsed


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
    if text.lower() not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
        raise ValueError("1 or 0")
    return text.lower() in ("1", "true", "yes", "on")


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
