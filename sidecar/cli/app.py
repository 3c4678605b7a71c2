"""All commands as one typer application. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.exceptions import TyperException

from sidecar.cli import direct
from sidecar.cli.output import COMPLETE, PROGRAM, fail
from sidecar.core.lifecycle.exit_codes import EXIT_CONFIGURATION

COMMANDS = {
    "run": "container",
    "status": "container",
    "ls": "checkpoints",
    "show": "checkpoints",
    "verify": "store_care",
    "pull": "store_copies",
    "push": "store_copies",
    "rm": "store_care",
    "prune": "store_care",
    "bad": "store_care",
    "resume": "checkpoints",
    "flush": "requests",
    "save": "requests",
    "limit": "requests",
    "drain": "container",
    "probe": "container",
    "install-hook": "hook",
    "inject": "manifests",
    "webhook": "manifests",
    "doctor": "doctor",
    "plan": "plan",
    "completion": "completion",
}
"""The module in this package that has a command, as the function or group of its name."""

_NAMES = {"help_option_names": ["-h", "--help"]}
"""Groups of commands take them over from the program."""


def invoke(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command and return its exit code; 2 and one line when they are not valid."""
    if COMPLETE in os.environ:
        return _complete()
    app = application(arguments[0] if arguments else "")
    try:
        return outcome(app, PROGRAM, arguments or ["--help"])
    except TyperException as error:
        command = f" {arguments[0]}" if arguments and arguments[0] in COMMANDS else ""
        of = getattr(error, "ctx", None)
        path = command if of is None else str(of.command_path).removeprefix(PROGRAM)  # of a command in a group, too
        said = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
        see = f"{' See' if said.endswith('?') else ': see'} '{PROGRAM}{path} --help'"
        return fail(f"{command}: {said}{see}", EXIT_CONFIGURATION, as_json="--json" in arguments)


def outcome(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a command of an application and return its exit code.

    Raises:
        TyperException: The arguments are not valid.
    """
    # Not app(): that would end the process and install an exception hook.
    group = typer.main.get_command(app)
    try:
        with group.make_context(program, list(arguments)) as context:
            return int(group.invoke(context) or 0)
    except typer.Exit as ended:
        return ended.exit_code


def _complete() -> int:
    """Answer a shell that asks for completions; its variables have the command line."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # imported there from a private module

    completion_init()
    try:
        typer.main.get_command(application("")).main([], prog_name=PROGRAM, complete_var=COMPLETE)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def application(name: str) -> typer.Typer:
    """Return the application with the command ``name``; with all commands if there is none of that name."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_NAMES, callback=_program)
    for known in [name] if name in COMMANDS else COMMANDS:
        found = _command(known)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=known)
        else:
            app.command(known)(found)
    return app


def _command(name: str) -> Callable[..., int] | typer.Typer:
    module = import_module(f"sidecar.cli.{COMMANDS[name]}")
    found: Callable[..., int] | typer.Typer = getattr(module, name.replace("-", "_"))
    return found


def _print_version(asked: bool) -> None:
    if asked:
        direct.version()
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Makes training state durable without touching training code."""
