"""The sidecar's settings: one class, read from the environment once, at start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, NoDecode, SettingsConfigDict

from sidecar.amounts import amount_bytes
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
    port_number,
)
from trainer_hook.contract.plain_text import plain_text

_DATA_CONNECTION = ("AWS_S3_ENDPOINT", "AWS_S3_BUCKET", "AWS_DEFAULT_REGION")
"""Names of a data connection: read from the mounted secret, too, which wins over the environment."""
_NAMES_OF_RUN = ("POD_NAMESPACE", "JOBSET_NAME", "LWS_NAME", "LWS_GROUP", "JOB_NAME")
"""Variables of the downward API that a store may refer to."""
_READ_NAMES = (SIDECAR_SETTINGS - {"CKPT_NODE_INDEX", "CKPT_NODE_COUNT"}).union(
    _DATA_CONNECTION, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION")
)


def _listen_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        return host.strip("[]") or "0.0.0.0", port_number(port)  # noqa: S104 - asked for
    except ValueError:
        raise ValueError("must be host:port, such as 0.0.0.0:9471") from None


Bytes = Annotated[int, BeforeValidator(amount_bytes)]
"""A number of bytes, given as text with its unit."""


def _variable(field: str) -> str:
    return f"CKPT_{field.upper()}"


class Settings(BaseSettings):
    """Each field is the variable ``CKPT_<FIELD>`` unless it says otherwise.

    Made by ``from_environment``, whose sources are all there are: no ``.env`` file, no command line.
    """

    model_config = SettingsConfigDict(
        alias_generator=_variable,
        case_sensitive=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        validate_default=False,
    )

    dir: Path = Path(DEFAULT_DIR)
    """The shared volume, one mount for both containers. A missing folder is an error and is never created; a path through a
    symbolic link on a volume is an error, too."""
    state_dir: Path | None = None
    """The sidecar's private state, which it trusts after a restart: journals, ``pod.json``, the last exit report. An existing
    directory outside ``CKPT_DIR`` that only the sidecar mounts, such as an ``emptyDir``; it may be lost with the pod. None:
    ``.ckpt`` on the shared volume; its journals are trusted only for objects of their own checkpoint."""
    store: str
    """``s3://bucket/prefix`` or ``file:///path``; one run per prefix."""
    run_id: str | None = None
    """Name of the run; a prefix of another run is refused. None: the Kubernetes job, if ``POD_NAMESPACE`` and ``JOBSET_NAME``
    or ``JOB_NAME`` are set. Of pods with one name the later takes the prefix over from the earlier. Without a name, any run is
    accepted once the pod that held the prefix has ended or gives no sign of life for 8 s, for which a resume waits, too."""

    credentials_dir: Path | None = None
    """Folder of a mounted secret with one file per ``AWS_*`` name; read again when the secret rotates. None: the environment,
    and what botocore knows: profiles, IRSA, instance metadata."""
    endpoint_url: Annotated[
        str | None, Field(validation_alias=AliasChoices("AWS_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    ] = None
    """URL of an S3 server, such as ``https://minio.example:9000``. None: AWS."""
    bucket: Annotated[str | None, Field(validation_alias="AWS_S3_BUCKET")] = None
    """Bucket of a ``CKPT_STORE`` without one, ``s3:///prefix``. None: ``CKPT_STORE`` names the bucket."""
    region: Annotated[str | None, Field(validation_alias=AliasChoices("AWS_DEFAULT_REGION", "AWS_REGION"))] = None
    """Region of the bucket. None: the profile's; with ``AWS_S3_ENDPOINT`` ``us-east-1``."""
    verify_tls: bool = True
    """Whether the server's certificate is verified."""
    ca_bundle: Path | None = None
    """File with the certificates of the authorities to trust instead of the system's, PEM; also for the service of a role,
    unless ``AWS_CA_BUNDLE`` names another one. None: the system's."""
    verify_access: bool = True
    """Whether a store that denies access at start ends the process with exit code 2. false: it is retried for ever."""
    verify: Literal["auto", "md5", "read-back", "off"] = "auto"
    """How uploads are verified. auto: the strongest checksum that the store demonstrably enforces (found by a probe at start):
    CRC64NVME, the signed SHA-256, the MD5 in its etags; else by reading back."""
    s3_client: Literal["wire", "boto3"] = "wire"
    """Client that sends and receives the bodies of files: the sidecar's own transport, or boto3, which costs more CPU time and
    hedges nothing. Use it to rule out the transport as the cause of a problem."""
    sse: Literal["AES256", "aws:kms"] | None = None
    """Server-side encryption to ask for. None: what the bucket says."""
    sse_kms_key_id: str | None = None
    """Key of ``CKPT_SSE=aws:kms``. None: the bucket's own."""
    s3_acl: Literal["private", "bucket-owner-read", "bucket-owner-full-control"] | None = None
    """Canned ACL to write objects with, for a bucket whose policy requires one; needs ``s3:PutObjectAcl``. None: no ACL is
    sent."""
    s3_request_payer: Literal["requester"] | None = None
    """``requester``: this account pays for all requests to a requester-pays bucket. None: the bucket's owner pays."""

    grace_seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Copy of the pod's terminationGracePeriodSeconds; an upper bound of the time from the first notice to SIGKILL."""
    mode: Literal["native", "classic"] = "native"
    """native: SIGTERM arrives after the trainer has ended, as in a native sidecar container. classic: both get SIGTERM at the
    same time, and the sidecar ends by itself after a successful training."""
    install_hook: Path | None = None
    """Directory on the shared volume, such as ``/checkpoints/.ckpt/hook``, into which the sidecar copies the hook at its start,
    before its API answers; for trainers whose ``PYTHONPATH`` names it. A sidecar that comes back beside a training that runs
    leaves the version that is there. None: it is not copied."""
    spot: Literal["aws", "gcp", "azure", "off"] = "off"
    """The cloud whose metadata service is polled for notices of preemption."""
    spot_endpoint: str | None = None
    """URL of that service; for aws also ``AWS_EC2_METADATA_SERVICE_ENDPOINT``. None: the cloud's own address."""

    keep_local: Annotated[int, Field(ge=1)] = 2
    """Durable checkpoints kept on the volume, newest first; checkpoints that the script rotates itself do not count. If it is
    not set, no more than ``CKPT_KEEP_STORE``."""
    keep_store: Annotated[int, Field(ge=1)] | None = None
    """Committed checkpoints kept in the store; only steps of the present training line that were seen whole count.
    None: all."""
    keep_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Multiples of this step are kept in the store for ever; None: none are."""
    min_free: Annotated[Bytes, Field(ge=0)] = 0
    """Free space on the volume, such as ``20GB``, below which durable checkpoints are deleted from it earlier. 0: no limit."""
    superseded: Literal["upload", "skip"] = "upload"
    """upload: checkpoints older than a durable one are uploaded when there is time. skip: they are not."""

    bandwidth_limit: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes per second of all uploads together, such as ``200MB/s``. None: no limit."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 16
    """Maximum concurrent requests. Large requests start with two to four, by the number of cores and the round-trip time, and
    adapt to throughput and to SlowDown. Small requests are as many as fill a round trip, and more while some wait for a late
    answer."""
    part_size: Annotated[Bytes, Field(ge=5 << 20, le=5 << 30)] | None = None
    """Bytes per multipart part; larger where the file would exceed the store's maximum number of parts. None: 16Mi to 64Mi;
    64 for large files if the store answers at once, less if the link takes longer than a quarter of a second for that."""

    resume: Literal["eager", "on-demand", "off"] = "eager"
    """eager: the download begins when the sidecar starts, before the trainer asks. on-demand: when it asks. off: never."""

    api_port: Annotated[int, BeforeValidator(port_number)] = DEFAULT_API_PORT
    """Port of the local API, on the loopback interface."""
    api_token: Literal["required", "off"] = "off"  # noqa: S105 - a mode, not a token
    """required: calls that change state need the bearer token of ``.ckpt/token``."""
    metrics_bind: Annotated[tuple[str, int] | None, NoDecode, BeforeValidator(_listen_address)] = None
    """``host:port`` that serves metrics and the two health calls to the outside; without a host, all IPv4 addresses."""
    log: Literal["json", "console"] = "json"
    """json: one JSON object a line. console: for people."""

    node: Node | None = Node()
    """From ``CKPT_NODE_*``, ``PET_*`` or ``JOB_COMPLETION_INDEX``. None: one of several nodes; the marker must name it."""
    is_first: bool = True
    """Whether this pod is node 0, which holds the prefix; ``CKPT_NODE_INDEX`` says it also where nothing says the count."""
    pod: str = "local"
    """The pod's UID, else its host name."""
    pod_is_unique: bool = False
    """``pod`` is a UID: no other pod has it. A machine with this host name may be used again."""
    restart: tuple[int, str] | None = None
    """Restart attempt and UID of the JobSet (``JOBSET_RESTART_ATTEMPT``, ``JOBSET_UID`` of the downward API). None: unknown."""
    job: str | None = None
    """``POD_NAMESPACE/JOBSET_NAME``, else ``POD_NAMESPACE/JOB_NAME`` (downward API): pods of one job replace each other."""

    @property
    def local_copies(self) -> int:
        """Durable checkpoints kept on the volume: after a restart a copy that the store keeps no more is uploaded again."""
        if self.keep_store is None or "keep_local" in self.model_fields_set:
            return self.keep_local
        return min(self.keep_local, self.keep_store)

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if not self.dir.is_absolute():
            raise ValueError(f"CKPT_DIR={self.dir} must be an absolute path")
        if self.state_dir is not None:
            _check_state_dir(self.state_dir, self.dir)
        if self.install_hook is not None and not self.install_hook.is_absolute():
            raise ValueError(f"CKPT_INSTALL_HOOK={self.install_hook} must be an absolute path, such as {self.dir}/.ckpt/hook")
        if self.spot_endpoint is not None and not self.spot_endpoint.startswith(("http://", "https://")):
            raise ValueError("CKPT_SPOT_ENDPOINT must be a URL such as http://169.254.169.254")
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError("CKPT_SSE_KMS_KEY_ID needs CKPT_SSE=aws:kms")
        if self.credentials_dir is not None and not self.credentials_dir.is_dir():
            raise ValueError(f"CKPT_CREDENTIALS_DIR={self.credentials_dir} is not a directory: mount the secret there")
        if self.ca_bundle is not None and not self.ca_bundle.is_file():
            raise ValueError(f"CKPT_CA_BUNDLE={self.ca_bundle} is not a file")
        if self.metrics_bind is not None and self.metrics_bind[1] == self.api_port != 0:
            raise ValueError(f"CKPT_METRICS_BIND: {self.api_port} is CKPT_API_PORT, too: choose another")
        return self


def _check_state_dir(state: Path, volume: Path) -> None:
    if not state.is_absolute():
        raise ValueError(f"CKPT_STATE_DIR={state} must be an absolute path")
    if state.resolve().is_relative_to(volume.resolve()):
        raise ValueError(
            f"CKPT_STATE_DIR={state} is on the shared volume, where the trainer can write: mount an emptyDir elsewhere"
        )


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
    _check_filled_in(environ, given.get("CKPT_STORE", ""))
    variables = EnvSettingsSource(Settings)
    variables.env_vars = _variables(given)
    try:
        secret = InitSettingsSource(Settings, _mounted_secret(given))
        check_settings(given)
        pod_identity = InitSettingsSource(Settings, _pod_identity(given, given.get("POD_UID") or pod_uid(mountinfo), hostname))
        return Settings(_build_sources=((secret, variables, pod_identity), {}))  # the first that has a value wins
    except ContractError as error:
        raise ConfigurationError(plain_text(str(error))) from None
    except ValidationError as error:
        raise ConfigurationError(plain_text(_first_line(error, given))) from None
    except OSError as error:
        raise ConfigurationError(
            plain_text(f"CKPT_CREDENTIALS_DIR or CKPT_CA_BUNDLE: {error.filename}: {error.strerror}")
        ) from None


def _mounted_secret(given: Mapping[str, str]) -> dict[str, str | None]:
    """Return the files of ``CKPT_CREDENTIALS_DIR`` that name the store. An empty one hides the variable of the same name."""
    if (directory := given.get("CKPT_CREDENTIALS_DIR")) is None:
        return {}
    files = [Path(directory, name) for name in _DATA_CONNECTION]
    return {file.name: file.read_text("utf-8", errors="replace").strip() or None for file in files if file.is_file()}


def _variables(given: Mapping[str, str]) -> dict[str, str | None]:
    read: dict[str, str | None] = {name: value for name, value in given.items() if name in _READ_NAMES}
    for name, value in read.items():
        if value is not None and value != value.encode(errors="replace").decode():  # bytes that Python could not decode
            raise ConfigurationError(f"{name}: its value is not UTF-8; set it again")
    if given.get("CKPT_SPOT") == "aws" and (endpoint := given.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")):
        read.setdefault("CKPT_SPOT_ENDPOINT", endpoint)
    return read


def _pod_identity(given: Mapping[str, str], pod: str | None, hostname: str) -> dict[str, Any]:
    """Return which pod this is: of which job and restart, and which of the job's nodes."""
    node = node_from_environment(given)
    return {
        "pod": _safe(pod or hostname),
        "pod_is_unique": pod is not None,
        "job": _job(given),
        "restart": _restart(given),
        "node": node,
        "is_first": node.index == 0 if node is not None else given.get("CKPT_NODE_INDEX") == "0",
    }


def _job(environ: Mapping[str, str]) -> str | None:
    name = environ.get("JOBSET_NAME") or environ.get("JOB_NAME")
    return f"{environ.get('POD_NAMESPACE', 'default')}/{name}"[:200] if name else None


def _check_filled_in(environ: Mapping[str, str], store: str) -> None:
    """Refuse a store whose variable was filled in with nothing: all runs would have one prefix.

    Kubernetes takes the empty text for a label that the pod does not have.
    """
    _, _, path = store.partition("://")
    if all(part and part == part.strip("-") for part in path.removeprefix("/").split("/")):
        return
    empty = [name for name in _NAMES_OF_RUN if name in environ and not environ[name].strip(" -")]
    if empty:
        raise ConfigurationError(
            f"CKPT_STORE: {empty[0]}, which names the run there, is empty: the pod does not have the label that it comes from "
            "(kubectl get pod -o yaml); add that, or write the name of the run into CKPT_STORE"
        )


def _restart(environ: Mapping[str, str]) -> tuple[int, str] | None:
    uid, number = environ.get("JOBSET_UID", "").lower(), environ.get("JOBSET_RESTART_ATTEMPT", "")
    is_known = re.match(r"[0-9a-f]{8}", uid, re.ASCII) and re.fullmatch(r"[0-9]{1,9}", number, re.ASCII)
    return (int(number), uid) if is_known else None


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:128] or "local"


def _first_line(error: ValidationError, given: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return said
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{name} is not set: it must be s3://bucket/prefix or file:///path"
    said = said.replace("Input should be", "must be") if first["type"] == "literal_error" else _accepted(name) or said
    return f"{name}={given.get(name, first['input'])!r}: {said[0].lower()}{said[1:]}"


def _accepted(name: str) -> str | None:
    """Return what a setting takes if that is a number, an amount or a truth value; ``None``: it has a message of its own."""
    info = Settings.model_fields.get(name.removeprefix("CKPT_").lower())
    if info is None:
        return None
    kinds, limits = _parts(info.annotation), limits_of(info.annotation, info.metadata)
    if bool in kinds:
        return "must be true or false"
    if not limits:
        return None
    if float in kinds:
        return f"must be a number {_range(limits)}, without a unit"
    is_amount = any(getattr(extra, "func", None) is amount_bytes for extra in _extras(info.annotation, info.metadata))
    return f"must be {'an amount such as 200MB, 16Mi or 1.5GiB,' if is_amount else 'a whole number'} {_range(limits)}"


def _range(limits: Mapping[str, float]) -> str:
    low = f"above {bound_text(limits['gt'])}" if "gt" in limits else f"from {bound_text(limits['ge'])}"
    if "le" not in limits:
        return low if "gt" in limits else f"{low} on"
    return f"{low} {'and at most' if 'gt' in limits else 'to'} {bound_text(limits['le'])}"


def limits_of(annotation: Any, metadata: Iterable[Any]) -> dict[str, float]:
    """Return the bounds of a field's type, by their sign: ``ge``, ``gt``, ``le``."""
    found = {}
    for extra in _extras(annotation, metadata):
        for limit in (extra, *getattr(extra, "metadata", ())):
            for sign in ("ge", "gt", "le"):
                if (bound := getattr(limit, sign, None)) is not None and get_origin(limit) is None:
                    found[sign] = bound
    return found


def bound_text(value: float) -> str:
    """Return a bound as it may be written into a setting."""
    for power, unit in ((30, "Gi"), (20, "Mi")):
        if value >= 1 << power and value % (1 << power) == 0:
            return f"{int(value) >> power}{unit}"
    return str(value)


def _parts(annotation: Any) -> list[Any]:
    return [annotation, *(part for part in get_args(annotation) if not isinstance(part, str))]


def _extras(annotation: Any, metadata: Iterable[Any]) -> list[Any]:
    return [*metadata, *(extra for part in _parts(annotation) for extra in getattr(part, "__metadata__", ()))]
