"""``inject`` and ``webhook``: the sidecar in Kubernetes manifests. The flags of ``inject`` come from the table of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from sidecar.cli.output import fail
from sidecar.core.lifecycle.exit_codes import EXIT_FAILED
from sidecar.kubernetes.inject import command
from sidecar.kubernetes.inject.options import FLAGS, Flag
from sidecar.kubernetes.inject.reports import NotInjectable


def _with_flags(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the table's flags as further parameters, by their fields."""
    own = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    named = [parameter.replace(annotation=own[name]) for name, parameter in signature.parameters.items() if name != "flags"]
    function.__signature__ = signature.replace(parameters=[*named, *map(_parameter, FLAGS)])  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in [*named, *map(_parameter, FLAGS)]}
    return function


def _parameter(flag: Flag) -> inspect.Parameter:
    option = typer.Option(f"--{flag.name}", metavar=flag.metavar, help=flag.text)
    kind: Any = bool if flag.metavar is None else str
    return inspect.Parameter(
        flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


@_with_flags
def inject(
    *,
    filename: Annotated[list[str], typer.Option("--filename", "-f", metavar="FILE", help="a manifest; - is standard input")],
    in_place: Annotated[bool, typer.Option("--in-place", "-i", help="write the files instead of standard output")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="print what would change instead")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="CKPT_NAME=VALUE", help="any other setting of either container")
    ] = None,
    **flags: str | bool | None,
) -> int:
    """Put the sidecar into Kubernetes manifests."""
    asked = {flag.name: flags[flag.field] for flag in FLAGS if flags[flag.field] is not None}
    given = {name: "true" if value is True else str(value) for name, value in asked.items()}
    try:
        options = command.options_from(given, settings or [])
        command.run(filename, options, in_place=in_place, diff=diff)
    except NotInjectable as error:
        return fail(f" inject: {error}", EXIT_FAILED)
    return 0


def webhook(
    host: Annotated[str, typer.Option("--host", help="address to listen on (default all)")] = "0.0.0.0",  # noqa: S104 - serves the API server
    port: Annotated[int, typer.Option("--port", help="port to listen on")] = 8443,
    tls_cert: Annotated[Path, typer.Option("--tls-cert", metavar="FILE", help="read again when it changes")] = Path(
        "/tls/tls.crt"
    ),
    tls_key: Annotated[Path, typer.Option("--tls-key", metavar="FILE", help="its private key")] = Path("/tls/tls.key"),
) -> int:
    """Put the sidecar into pods: a mutating admission webhook."""
    from sidecar.kubernetes.webhook.server import run

    run(host=host, port=port, tls_cert=tls_cert, tls_key=tls_key)
    return 0
