"""Options of an injection, in one table: flags of ``inject``, annotations of a pod, defaults of the webhook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar import __version__
from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.quantity import quantity
from sidecar.store_url import shown, store_place
from trainer_hook.contract import (
    DEFAULT_API_PORT,
    DEFAULT_DIR,
    HOOK_SETTINGS,
    KNOWN_SETTINGS,
    REMOVED_SETTINGS,
    ContractError,
    check_settings,
)

DEFAULT_IMAGE = f"checkpoint-sidecar:{__version__}"
ANNOTATION = "checkpoint-sidecar/"
LABEL = f"{ANNOTATION}inject"
"""On a pod: the webhook gives it a sidecar if its value is ``true``."""
ENVIRONMENT = "CKPT_INJECT_"
_DERIVED = frozenset(
    {"CKPT_DIR", "CKPT_GRACE_SECONDS", "CKPT_STORE", "CKPT_MODE", "CKPT_API_PORT", "CKPT_CREDENTIALS_DIR", "CKPT_STATE_DIR"}
)
ANY_BUCKET = "bucket-of-the-secret"
"""Stands for the bucket of ``s3:///prefix`` where a URL is only checked."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """Each field is the flag ``--<field>``; unset ones leave what a manifest says."""

    store: str | None = None
    """``s3://bucket/prefix`` or ``file:///path``; ``{namespace}`` and ``{name}`` stand for the run's own."""
    secret: str | None = None
    """A Secret with one key per ``AWS_*`` name, such as a data connection; mounted as files in the sidecar alone."""
    claim: str | None = None
    """A PersistentVolumeClaim that holds a ``file://`` store, mounted in the sidecar alone."""
    image: str | None = None
    mode: str = "auto"
    """``native``, ``classic``, or ``auto``: native from Kubernetes 1.29 on."""
    kubernetes_version: tuple[int, int] | None = None
    """Such as (1, 29); ``None``: one that has native sidecars."""
    trainer_container: str | None = None
    only: tuple[str, ...] = ()
    """Kinds, or ``Kind/name``, of the documents that get a sidecar; none: all that have pods."""
    pods: tuple[str, ...] = ()
    """Names of replicas, replicated jobs or worker groups that get a sidecar; none: all that train."""
    grace: int | None = None
    """Seconds: the pod's terminationGracePeriodSeconds and ``CKPT_GRACE_SECONDS`` of both containers."""
    dir: str | None = None
    install_hook: bool = False
    doctor: bool = False
    """An init container examines store and volume before anything else of the pod starts."""
    metrics_port: int | None = None
    api_port: int | None = None
    run_as_user: int | None = None
    cpu: str | None = None
    """Quantities of the sidecar's resources: requests, and limits. Not given: its defaults, or what the manifest says."""
    cpu_limit: str | None = None
    memory: str | None = None
    memory_limit: str | None = None
    cloud_identity: bool = False
    """The credentials are the service account's (IRSA), and only the sidecar gets them."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """``CKPT_*`` of either container."""

    @property
    def resources(self) -> dict[str, tuple[str | None, str | None]]:
        """Request and limit of the sidecar's ``cpu`` and ``memory``."""
        return {"cpu": (self.cpu, self.cpu_limit), "memory": (self.memory, self.memory_limit)}

    @property
    def is_native(self) -> bool:
        """Whether the sidecar becomes an init container with ``restartPolicy: Always``."""
        if self.mode == "auto":
            return self.kubernetes_version is None or self.kubernetes_version >= (1, 29)
        return self.mode == "native"

    def trainer_settings(self) -> dict[str, str]:
        """Return the hook's settings, apart from those that both containers share."""
        return {name: value for name, value in self.settings.items() if name in HOOK_SETTINGS}

    def sidecar_settings(self) -> dict[str, str]:
        """Return the sidecar's settings; one that both containers know is in both."""
        shared = {"CKPT_LOG", "CKPT_NODE_COUNT", "CKPT_NODE_INDEX"}
        return {name: value for name, value in self.settings.items() if name not in HOOK_SETTINGS or name in shared}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option: its name with dashes, how its text is read, and what it is for."""

    name: str
    parse: Callable[[str], Any]
    text: str
    metavar: str | None = None
    """``None``: a switch."""

    @property
    def field(self) -> str:
        """The field of ``Options``, or the setting ``CKPT_<FIELD>``."""
        return self.name.replace("-", "_")

    @property
    def is_setting(self) -> bool:
        """Whether it becomes an environment variable of the same name."""
        return self.field not in Options.__slots__


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(text)

    return parse


def _grace(text: str) -> int:
    """Return whole seconds of ``120``, ``120s``, ``2m`` or ``1h``."""
    number, unit = text[:-1], text[-1:].lower()
    seconds = {"s": 1, "m": 60, "h": 3600}
    if unit in seconds and number.isascii() and number.isdigit() and len(number) < 9:
        text = str(int(number) * seconds[unit])
    try:
        return _whole(1, 86_400)(text)
    except ValueError:
        raise ValueError("must be a duration from 1s to 24h, such as 120, 90s or 2m") from None


def _truth(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false"):
        raise ValueError("must be true or false")
    return text.lower() in ("1", "true")


def _store(text: str) -> str:
    filled = in_store(text, namespace="namespace", name="name")
    if "{" in filled or "}" in filled:
        raise ValueError("has braces that are neither {namespace} nor {name}")
    store_place(filled.replace("$(", "("), bucket=ANY_BUCKET)
    return re.sub(r"(?<=[^/:])/+$", "", text)


def in_store(store: str, *, namespace: str, name: str) -> str:
    """Return a store with the names of one workload filled in."""
    return store.replace("{namespace}", namespace).replace("{name}", name)


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"v?([0-9]{1,2})\.([0-9]{1,3})(?:[.+-].*)?", text, re.ASCII)
    if not match:
        raise ValueError("must be a version such as 1.31")
    return int(match[1]), int(match[2])


def _object_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be the name of a Kubernetes object")
    return text


def _quantity(least: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        number, fewest = quantity(text), quantity(least)
        if number is None or fewest is None or number < fewest:
            raise ValueError(f"must be a quantity of at least {least}")
        return text

    return parse


def _directory(text: str) -> str:
    if not text.startswith("/") or text.rstrip("/") == "" or ".." in text.split("/"):
        raise ValueError("must be an absolute path other than /")
    return text.rstrip("/")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _count(text: str) -> str:
    return str(_whole(1)(text))


FLAGS = (
    Flag(
        "store", _store, "where checkpoints go: s3://bucket/prefix or file:///path; {namespace} and {name} are filled in", "URL"
    ),
    Flag("secret", _object_name, "Secret with AWS_* keys, mounted as files in the sidecar alone", "NAME"),
    Flag("cloud-identity", _truth, "credentials come from the service account (IRSA); the other containers get none"),
    Flag("claim", _object_name, "PersistentVolumeClaim of a file:// store, mounted in the sidecar alone", "NAME"),
    Flag("image", str, f"the sidecar's image (default {DEFAULT_IMAGE})", "IMAGE"),
    Flag("mode", _one_of("auto", "native", "classic"), "auto: native from Kubernetes 1.29 on", "auto|native|classic"),
    Flag("kubernetes-version", _version, "the cluster's, such as 1.31", "VERSION"),
    Flag("trainer-container", str, "which container trains, where there are several", "NAME"),
    Flag("only", _names, "documents that get a sidecar, by kind or kind/name (default: all with pods)", "KIND[/NAME],…"),
    Flag("pods", _names, "replicas, replicated jobs or worker groups that get a sidecar (default: all)", "NAME,…"),
    Flag("grace", _grace, "time from the notice to the end, such as 2m: the pod's and both containers'", "DURATION"),
    Flag("dir", _directory, f"where the trainer sees the shared volume (default {DEFAULT_DIR})", "DIR"),
    Flag("install-hook", _truth, "bring the hook to the trainer through the volume: its image and command stay as they are"),
    Flag("doctor", _truth, "examine store, volume and grace period in an init container, before the trainer starts"),
    Flag("metrics-port", _whole(1, 65_535), "serve metrics and health there to the outside", "PORT"),
    Flag("api-port", _whole(1, 65_535), f"port of the local API (default {DEFAULT_API_PORT})", "PORT"),
    Flag("run-as-user", _whole(0), "UID of the sidecar: the trainer's", "UID"),
    Flag("cpu", _quantity("10m"), "CPU that the sidecar requests (default 100m; 500m in a Guaranteed pod)", "QUANTITY"),
    Flag("cpu-limit", _quantity("50m"), "CPU that it may use, where a quota asks for a limit (default: no limit)", "QUANTITY"),
    Flag("memory", _quantity("128Mi"), "memory that it requests (default 256Mi; 512Mi in a Guaranteed pod)", "QUANTITY"),
    Flag("memory-limit", _quantity("256Mi"), "memory that it may use (default 512Mi)", "QUANTITY"),
    Flag("save-strategy", _one_of("steps", "epoch", "minutes", "no"), "when the hook saves", "steps|epoch|minutes|no"),
    Flag("save-steps", _count, "save interval in steps", "STEPS"),
    Flag("save-minutes", _count, "save interval in minutes", "MINUTES"),
    Flag("save-total-limit", _count, "checkpoints that the hook leaves on the volume", "COUNT"),
    Flag("jit", lambda text: "1" if _truth(text) else "0", "save just in time at a termination notice", "true|false"),
    Flag("keep-local", _count, "durable checkpoints left on the volume", "COUNT"),
    Flag("keep-store", _count, "checkpoints left in the store", "COUNT"),
    Flag("bandwidth-limit", str, "bytes per second of all uploads, such as 200MB/s", "RATE"),
)


def with_given(options: Options, given: Mapping[str, str], *, prefix: str = "--") -> Options:
    """Return the options with the given texts, by flag name; ``settings`` entries by ``CKPT_*`` name.

    Raises:
        ConfigurationError: One line that names what was given and what it may be.
    """
    known = {flag.name: flag for flag in FLAGS}
    fields: dict[str, Any] = {}
    settings = dict(options.settings)
    for name, text in given.items():
        if name.startswith("CKPT_"):
            settings[name] = text
            continue
        flag = known.get(name)
        if flag is None:
            raise ConfigurationError(
                f"{prefix}{name} is not an option{_nearest(name, known)}: see 'checkpoint-sidecar inject --help'"
            )
        try:
            value = flag.parse(text.strip())
        except ValueError as error:
            raise ConfigurationError(f"{prefix}{name}={shown(text)!r} {error}") from None
        if flag.is_setting:
            settings[f"CKPT_{flag.field.upper()}"] = value
        else:
            fields[flag.field] = value
    return _checked(replace(options, settings=settings, **fields))


def _nearest(name: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _checked(options: Options) -> Options:
    try:
        check_settings(options.settings)
    except ContractError as error:
        raise ConfigurationError(str(error)) from None
    for name in sorted(_DERIVED & set(options.settings)):
        flags = {"CKPT_GRACE_SECONDS": "--grace", "CKPT_CREDENTIALS_DIR": "--secret"}
        if name == "CKPT_STATE_DIR":
            raise ConfigurationError(f"{name}: the sidecar gets a volume of its own for it")
        raise ConfigurationError(f"{name}: use {flags.get(name, '--' + name[5:].lower().replace('_', '-'))}")
    for name, (request, limit) in options.resources.items():
        numbers = [number for number in map(quantity, (request, limit)) if number is not None]
        if len(numbers) > 1 and numbers[0] > numbers[1]:
            raise ConfigurationError(f"--{name} {request} is more than --{name}-limit {limit}")
    if options.claim and options.store and not options.store.startswith("file://"):
        raise ConfigurationError(f"--claim is for a file:// store, --store is {options.store}")
    if options.metrics_port is not None and options.metrics_port == (options.api_port or DEFAULT_API_PORT):
        raise ConfigurationError(f"--metrics-port {options.metrics_port} is the API's port, too: choose another")
    if options.secret and options.cloud_identity:
        raise ConfigurationError("--secret and --cloud-identity are two ways to the same credentials: choose one")
    return options


def from_annotations(options: Options, annotations: Mapping[str, Any]) -> Options:
    """Return the options with those of a pod, ``checkpoint-sidecar/<flag>``; such as ``checkpoint-sidecar/grace: "120"``.

    Raises:
        ConfigurationError: An annotation with the prefix that is no option, or not valid.
    """
    given = {key.removeprefix(ANNOTATION): str(value) for key, value in annotations.items() if key.startswith(ANNOTATION)}
    return with_given(_for_another_store(options, given), given, prefix=ANNOTATION)


def _for_another_store(defaults: Options, given: Mapping[str, str]) -> Options:
    """Return the defaults without the access to a store of another kind, or by other credentials, than a pod names."""
    store = given.get("store", "").strip()
    if store.startswith("file:"):
        return replace(defaults, secret=None, cloud_identity=False)
    if store.startswith("s3:"):
        defaults = replace(defaults, claim=None)
    if "secret" in given:
        return replace(defaults, cloud_identity=False)
    return replace(defaults, secret=None) if given.get("cloud-identity", "").lower() in ("1", "true") else defaults


def from_environment(environ: Mapping[str, str]) -> Options:
    """Return the webhook's defaults: ``CKPT_INJECT_<FLAG>``, and ``CKPT_*`` settings that every pod gets.

    Raises:
        ConfigurationError: A name that is no option, or a value that is not valid.
    """
    flags = {name: text for name, text in environ.items() if name.startswith(ENVIRONMENT) and text.strip()}
    given = {name.removeprefix(ENVIRONMENT).lower().replace("_", "-"): text for name, text in flags.items()}
    # CKPT_LOG is the webhook's own.
    ours = (KNOWN_SETTINGS - _DERIVED - {"CKPT_LOG"}).union(REMOVED_SETTINGS)
    settings = {name: text for name, text in environ.items() if name in ours and text.strip()}
    return with_given(Options(), {**given, **settings}, prefix="option ")
