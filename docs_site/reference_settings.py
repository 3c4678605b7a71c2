"""The reference of the settings, made of the classes that read them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from sidecar.daemon.settings import Settings, bound_text, limits_of
from trainer_hook.contract import DEFAULT_API_PORT, HOOK_SETTINGS, KNOWN_SETTINGS, SIDECAR_SETTINGS
from trainer_hook.process import settings as hook

_HEAD = """# Settings

All are environment variables. A misspelt `CKPT_*` stops the start with exit code 2 and the nearest known name; a variable that
is set but empty counts as not set. Sizes are `48GB`, `64Mi`; rates `200MB/s`; `1` is `true` and `0` is `false`. `inject --set
NAME=VALUE` writes a setting into a manifest ([labels and annotations](reference/annotations.md)).
This page is made of the code: `make reference`.
"""
_TAIL = """
Runs resume from their own prefix. A checkpoint that another system wrote is brought to a new prefix once
([OPERATIONS.md](../OPERATIONS.md#from-the-kubeflow-sdks-s3-checkpoints)).

`OTEL_EXPORTER_OTLP_ENDPOINT` says where [traces](metrics.md#traces) of checkpoints go; other `OTEL_*` apply, too.

## Credentials and the store's address

As in botocore: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_PROFILE`, a service account's role
(IRSA) or instance metadata; in a mounted secret ([`CKPT_CREDENTIALS_DIR`](#sidecar)) one file per name. Proxies are
`HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` ([proxies](how-to/proxies.md)). A data connection of OpenShift AI has
`AWS_S3_ENDPOINT`, `AWS_S3_BUCKET` and `AWS_DEFAULT_REGION`, too:

"""
TRUTH = "`true`, `false`"
_ELSEWHERE = {
    "CKPT_API_PORT": (
        f"`{DEFAULT_API_PORT}`",
        "a whole number from 1 to 65535; of the sidecar also 0",
        "Port of the local API, on the loopback interface. 0: any free one; the API is found by its socket on the volume.",
    ),
    "CKPT_NODE_INDEX": (
        "torchrun's, the Job's, or one node",
        "a whole number from 0 on",
        "This pod's index in the job, unless the hook reports it. An index alone means that there are several nodes, of which "
        "0 holds the prefix.",
    ),
    "CKPT_NODE_COUNT": (
        "torchrun's, or one node",
        "a whole number from 1 on",
        "Number of pods of the job, with the same sources.",
    ),
    "CKPT_HOOK": (
        "none",
        "`auto`, `off`",
        "auto: activates the hook where `PYTHONPATH` names its folder ([without changing the "
        "image](trainers.md#without-changing-the-image)). off, or not set: it is not active there.",
    ),
}
"""Settings that no field of a class describes: default, values, meaning."""


def page() -> str:
    """Return docs/settings.md.

    Raises:
        ValueError: A setting has no description.
    """
    rows = _sidecar_rows() | _hook_rows() | {name: _row(name, *texts) for name, texts in _ELSEWHERE.items()}
    if missing := KNOWN_SETTINGS - rows.keys():
        raise ValueError(f"not described: {sorted(missing)}")
    both = HOOK_SETTINGS & SIDECAR_SETTINGS
    parts = [
        ("Both containers", both),
        ("Trainer (hook)", HOOK_SETTINGS - both),
        ("Sidecar", SIDECAR_SETTINGS - both),
    ]
    tables = [_table(title, [row for name, row in rows.items() if name in names]) for title, names in parts]
    return _HEAD + "".join(tables) + _TAIL + _header() + "".join(_store_rows())


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the string under each field of a class, as one line of Markdown."""
    [body] = [node for node in ast.walk(ast.parse(inspect.getsource(kind))) if isinstance(node, ast.ClassDef)]
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def _sidecar_rows() -> dict[str, str]:
    meanings, found = attribute_docstrings(Settings), {}
    for field, info in Settings.model_fields.items():
        name = f"CKPT_{field.upper()}"
        if name in SIDECAR_SETTINGS:
            default = "required" if info.is_required() else _default(info.default)
            found[name] = _row(name, default, _values(info.annotation, info.metadata), meanings[field])
    return found


def _store_rows() -> Iterable[str]:
    meanings = attribute_docstrings(Settings)
    for field in ("endpoint_url", "bucket", "region"):
        alias = Settings.model_fields[field].validation_alias
        names = [alias] if isinstance(alias, str) else [str(choice) for choice in getattr(alias, "choices", [])]
        yield _row("`, `".join(map(str, names)), "none", "", meanings[field])


def _hook_rows() -> dict[str, str]:
    meanings, found = attribute_docstrings(hook.Settings), {}
    defaults = {each.name: each.default for each in dataclasses.fields(hook.Settings)}
    for field, (name, parse) in hook._VARIABLES.items():
        if name in SIDECAR_SETTINGS:
            continue
        value = "continue" if name == "CKPT_ON_STORE_FAILURE" else defaults[field]
        values = TRUTH if isinstance(value, bool) else _valid(parse)
        found[name] = _row(name, _default(value), values, meanings[field])
    return found


def _valid(parse: Any) -> str:
    """Return the values that a parser of the hook says it takes."""
    try:
        parse("\0")
    except ValueError as error:
        return str(error)
    return ""


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _values(annotation: Any, metadata: Iterable[Any]) -> str:
    said = []
    parts = [annotation, *(part for part in get_args(annotation) if not isinstance(part, str))]
    literals = [choice for part in parts for choice in get_args(part) if isinstance(choice, str)]
    if literals:
        said.append(", ".join(f"`{choice}`" for choice in dict.fromkeys(literals)))
    elif bool in parts:
        said.append(TRUTH)
    elif Path in parts:
        said.append("a path")
    texts = {"ge": "from", "gt": "more than", "le": "to"}
    said += [f"{texts[sign]} {_bound(bound)}" for sign, bound in limits_of(annotation, metadata).items()]
    return " ".join(said)


def _bound(value: float) -> str:
    text = bound_text(value)
    return text if text.endswith("i") else f"{value:,}"


def _header() -> str:
    return "| setting | default | values | meaning |\n| --- | --- | --- | --- |\n"


def _table(title: str, rows: list[str]) -> str:
    return f"\n## {title}\n\n{_header()}" + "".join(rows)


def _row(name: str, default: str, values: str, meaning: str) -> str:
    cells = (default, values.replace("|", "\\|"), meaning.replace("|", "\\|"))
    return f"| `{name}` | " + " | ".join(cells) + " |\n"
