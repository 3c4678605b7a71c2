"""Removes what may be a secret from Kubernetes objects and from text, before they leave the cluster in a bundle.

Values are kept by permission: of environment variables only those with a known harmless name, of annotations those of known
systems. Commands may carry tokens, and the Kubeflow SDK puts a notebook's whole function there: they are hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sidecar.core.job.pods import SIDECAR

HIDDEN = "(hidden)"
_OURS = (SIDECAR, "checkpoint-hook")
_HARMLESS = re.compile(
    r"CKPT_[A-Z_]+|PET_[A-Z_]+|NCCL_[A-Z_]+|TORCH_[A-Z_]+|JOB_[A-Z_]+|JOBSET_[A-Z_]+|LWS_[A-Z_]+|POD_[A-Z_]+|AWS_DEFAULT_REGION|AWS_REGION"
    r"|AWS_S3_ENDPOINT|AWS_S3_BUCKET|AWS_ENDPOINT_URL(_S3)?|AWS_ROLE_ARN|PYTHON(PATH|UNBUFFERED)|OMP_NUM_THREADS|HOME"
)
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL(?!S_DIR)|PRIVATE|API_KEY|ACCESS_KEY", re.IGNORECASE)
_KNOWN_ANNOTATIONS = re.compile(
    r"checkpoint-sidecar/.*|(.*\.)?(kueue|jobset|batch|trainer|training|apps|leaderworkerset|pod-security)\.?[a-z0-9.-]*/.*"
)
_DROPPED = ("managedFields",)
_FREE_FORM = ("volumeAttributes", "options", "data", "stringData", "binaryData", "httpHeaders")
_TEXTS = (
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\b(?:hf_|gh[pousr]_|glpat-|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), HIDDEN),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+(?!\(hidden\))[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?i)(x-(?:amz|goog)-(?:signature|security-token|credential)=)[^&\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s:@\"']*:[^/\s@\"']+@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"(?i)([a-z0-9_.-]*(?:secret|password|passwd|token|api[_-]?key|access[_-]?key)[a-z0-9_.-]*[\"']?\s*[=:]\s*)"
            r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;&}]+)+"
        ),
        rf"\1{HIDDEN}",
    ),
)


def scrubbed_text(text: str) -> str:
    """Return text with access keys, tokens, passwords, signatures and private keys hidden. Doing it again changes nothing."""
    for pattern, shown in _TEXTS:
        text = pattern.sub(shown, text)
    return text


def scrubbed_answer(value: Any) -> Any:
    """Return a copy of a sidecar's answer, whose fields are known to be harmless: its texts are scrubbed."""
    if isinstance(value, Mapping):
        return {str(name): scrubbed_answer(below) for name, below in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [scrubbed_answer(each) for each in value]
    return scrubbed_text(value) if isinstance(value, str) else value


def scrubbed_object(value: Any) -> Any:
    """Return a copy of a Kubernetes object that keeps what explains a run and hides what may be a secret."""
    return _scrubbed(value, is_ours=False)


def _scrubbed(value: Any, *, is_ours: bool) -> Any:
    if isinstance(value, Mapping):
        is_ours = str(value["name"]) in _OURS if "name" in value and ("image" in value or "env" in value) else is_ours
        return {
            str(name): _field(str(name), below, is_ours=is_ours) for name, below in value.items() if str(name) not in _DROPPED
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_scrubbed(each, is_ours=is_ours) for each in value]
    return scrubbed_text(value) if isinstance(value, str) else value


def _field(name: str, value: Any, *, is_ours: bool) -> Any:
    if name in ("command", "args") and not is_ours:
        return HIDDEN
    if name == "env" and isinstance(value, Sequence):
        return [_variable(entry) for entry in value]
    if name == "annotations" and isinstance(value, Mapping):
        return {key: _annotation(str(key), text) for key, text in value.items()}
    if name in _FREE_FORM and isinstance(value, Mapping | Sequence):
        return HIDDEN
    return _scrubbed(value, is_ours=is_ours)


def _variable(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or "value" not in entry:
        return _scrubbed(entry, is_ours=False)
    name = str(entry.get("name"))
    keeps = _HARMLESS.fullmatch(name) is not None and not _SECRET_NAME.search(name)
    return {"name": name, "value": scrubbed_text(str(entry["value"])) if keeps else HIDDEN}


def _annotation(name: str, value: Any) -> str:
    is_known = _KNOWN_ANNOTATIONS.fullmatch(name) is not None and "last-applied" not in name
    return scrubbed_text(str(value)) if is_known else HIDDEN
