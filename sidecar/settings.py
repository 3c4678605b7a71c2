"""The sidecar's settings: one class, read from the environment once, at start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sidecar.errors import ConfigurationError
from trainer_hook.contract import (
    DEFAULT_API_PORT,
    DEFAULT_DIR,
    SIDECAR_SETTINGS,
    ContractError,
    Node,
    check_settings,
    node_from_environment,
    pod_uid,
)

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)(?:/s)?", re.ASCII)
_DATA_CONNECTION = {"AWS_S3_ENDPOINT": "endpoint_url", "AWS_S3_BUCKET": "bucket", "AWS_DEFAULT_REGION": "region"}


def amount_bytes(text: Any) -> Any:
    """Return the bytes that ``200MB``, ``16Mi``, ``1.5 GiB`` or ``200MB/s`` stand for.

    Raises:
        ValueError: Anything else.
    """
    if not isinstance(text, str):
        return text
    match = _AMOUNT.fullmatch(text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("must be an amount such as 200MB, 16Mi or 1.5GiB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _port(value: int) -> int:
    if not 0 <= value < 65536:
        raise ValueError("must be a port from 1 to 65535, or 0 for any free one")
    return value


Bytes = Annotated[int, BeforeValidator(amount_bytes)]


class Settings(BaseModel):
    """Each field is the variable ``CKPT_<FIELD>`` unless it says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Path(DEFAULT_DIR)
    """The shared volume, one mount for both containers."""
    store: str
    """``s3://bucket/prefix`` or ``file:///path``; one run per prefix."""
    run_id: str | None = None
    """Name of the run. A prefix whose ``run.json`` holds another is refused; unset: whatever run the prefix holds."""

    credentials_dir: Path | None = None
    """A mounted secret with one file per ``AWS_*`` name; read again when it rotates."""
    endpoint_url: str | None = None
    """``AWS_S3_ENDPOINT`` or ``AWS_ENDPOINT_URL[_S3]``: other than AWS."""
    bucket: str | None = None
    """``AWS_S3_BUCKET``: fills in ``s3:///prefix``."""
    region: str | None = None
    """``AWS_DEFAULT_REGION`` or ``AWS_REGION``."""
    verify_tls: bool = True
    ca_bundle: Path | None = None
    verify_access: bool = True
    """A store that refuses us at start ends the process with exit code 2; false: it is tried for ever."""
    verify: Literal["auto", "md5", "read-back", "off"] = "auto"
    """How uploads are verified where the store does not do it."""
    sse: Literal["AES256", "aws:kms"] | None = None
    sse_kms_key_id: str | None = None

    grace_seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Copy of the pod's terminationGracePeriodSeconds; an upper bound of the time from the first notice to SIGKILL."""
    mode: Literal["native", "classic"] = "native"
    """native: SIGTERM arrives after the trainer ended; classic: with it, and the sidecar ends by itself after success."""
    spot: Literal["aws", "gcp", "azure", "off"] = "off"
    """Whose metadata service is asked whether the machine is about to be taken away."""
    spot_endpoint: str | None = None
    """Where that service is; also ``AWS_EC2_METADATA_SERVICE_ENDPOINT``. Unset: where the cloud has it."""

    keep_local: Annotated[int, Field(ge=1)] = 2
    """Durable checkpoints left on the volume, newest first; those that the script rotates itself are not counted."""
    keep_store: Annotated[int, Field(ge=1)] | None = None
    """Committed checkpoints left in the store; unset: all."""
    keep_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps divisible by it stay in the store for ever."""
    min_free: Annotated[Bytes, Field(ge=0)] = 0
    """Disk guard: below it, durable checkpoints leave the volume earlier."""
    superseded: Literal["upload", "skip"] = "upload"
    """What becomes of checkpoints older than a durable one: uploaded when there is time, or not at all."""

    bandwidth_limit: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes per second of all uploads together."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 16
    """Requests at once, at most. Large ones begin with two to four and become more while that is faster."""
    part_size: Annotated[Bytes, Field(ge=5 << 20, le=5 << 30)] | None = None
    """Bytes per multipart part, before it grows to keep within the store's number of parts. Unset: 16 to 64 MiB, by the size
    of the file and the way to the store."""

    resume: Literal["eager", "on-demand", "off"] = "eager"
    """eager: the download begins when the sidecar starts, before the trainer asks."""
    resume_foreign: bool = False

    api_port: Annotated[int, AfterValidator(_port)] = DEFAULT_API_PORT
    api_token: Literal["required", "off"] = "off"  # noqa: S105 - a mode, not a token
    """required: calls that change something need the bearer token of ``.ckpt/token``."""
    metrics_bind: str | None = None
    """``host:port`` that serves metrics and the two health calls to the outside."""
    log: Literal["json", "console"] = "json"

    node: Node | None = Node()
    """From ``CKPT_NODE_*``, ``PET_*`` or ``JOB_COMPLETION_INDEX``; None: one of several, the marker must say which."""
    pod: str = "local"
    """The pod's UID, else its host name."""
    restart: tuple[int, str] | None = None
    """``JOBSET_RESTART_ATTEMPT`` and ``JOBSET_UID``, from the downward API: which restart of which JobSet this pod is of."""
    job: str | None = None
    """``POD_NAMESPACE`` and ``JOBSET_NAME`` or ``JOB_NAME``, from the downward API: pods of one job replace each other."""

    def without_effect(self) -> list[str]:
        """Return the settings that are asked for and that this version knows only by name."""
        asked = {"CKPT_RESUME_FOREIGN": self.resume_foreign}
        return [name for name, is_asked in asked.items() if is_asked]

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if not self.dir.is_absolute():
            raise ValueError(f"CKPT_DIR={self.dir} must be an absolute path")
        if self.spot_endpoint is not None and not self.spot_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"CKPT_SPOT_ENDPOINT={self.spot_endpoint} must be a URL such as http://169.254.169.254")
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError("CKPT_SSE_KMS_KEY_ID needs CKPT_SSE=aws:kms")
        if self.credentials_dir is not None and not self.credentials_dir.is_dir():
            raise ValueError(f"CKPT_CREDENTIALS_DIR={self.credentials_dir} is not a directory: mount the secret there")
        if self.ca_bundle is not None and not self.ca_bundle.is_file():
            raise ValueError(f"CKPT_CA_BUNDLE={self.ca_bundle} is not a file")
        return self


def from_environment(environ: Mapping[str, str], *, mountinfo: str = "", hostname: str = "local") -> Settings:
    """Read the settings.

    Args:
        environ: The process environment. Variables that are set but empty count as not set.
        mountinfo: Text of ``/proc/self/mountinfo``, which names the pod's UID.
        hostname: Stands in for the pod's UID outside Kubernetes.

    Raises:
        ConfigurationError: One line that names the variable and what it may be.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    fields: dict[str, Any] = {
        name.removeprefix("CKPT_").lower(): value
        for name, value in given.items()
        if name in SIDECAR_SETTINGS and name not in ("CKPT_NODE_INDEX", "CKPT_NODE_COUNT")
    }
    if fields.get("spot") == "aws" and (endpoint := given.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")):
        fields.setdefault("spot_endpoint", endpoint)
    fields["pod"] = _safe(given.get("POD_UID") or pod_uid(mountinfo) or hostname)
    fields["job"], fields["restart"] = _job(given), _restart(given)
    try:
        fields |= _data_connection(given)
        check_settings(given)
        fields["node"] = node_from_environment(given)
        settings = Settings.model_validate(fields)
    except ContractError as error:
        raise ConfigurationError(str(error)) from None
    except ValidationError as error:
        raise ConfigurationError(_first_line(error)) from None
    except OSError as error:
        raise ConfigurationError(f"CKPT_CREDENTIALS_DIR or CKPT_CA_BUNDLE: {error.filename}: {error.strerror}") from None
    return settings


def _data_connection(environ: Mapping[str, str]) -> dict[str, str]:
    directory = environ.get("CKPT_CREDENTIALS_DIR")
    found = {field: environ[name] for name, field in _DATA_CONNECTION.items() if name in environ}
    found.setdefault("endpoint_url", environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "")
    found.setdefault("region", environ.get("AWS_REGION", ""))
    for name, field in _DATA_CONNECTION.items():
        mounted = Path(directory, name) if directory else None
        if mounted is not None and mounted.is_file():
            found[field] = mounted.read_text("utf-8", errors="replace").strip()
    return {field: value for field, value in found.items() if value}


def _job(environ: Mapping[str, str]) -> str | None:
    name = environ.get("JOBSET_NAME") or environ.get("JOB_NAME")
    return f"{environ.get('POD_NAMESPACE', 'default')}/{name}"[:200] if name else None


def _restart(environ: Mapping[str, str]) -> tuple[int, str] | None:
    uid, number = environ.get("JOBSET_UID", "").lower(), environ.get("JOBSET_RESTART_ATTEMPT", "")
    is_told = re.match(r"[0-9a-f]{8}", uid, re.ASCII) and re.fullmatch(r"[0-9]{1,9}", number, re.ASCII)
    return (int(number), uid) if is_told else None


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:128] or "local"


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return said
    name = f"CKPT_{str(first['loc'][0]).upper()}"
    if first["type"] == "missing":
        return f"{name} is not set: it must be s3://bucket/prefix or file:///path"
    return f"{name}={first['input']!r}: {said[0].lower()}{said[1:]}"
