"""``checkpoint-sidecar inject``: files or standard input in, standard output or the files out."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

from sidecar.errors import ConfigurationError
from sidecar.inject.manifests import InjectedText, inject_text
from sidecar.inject.options import FLAGS, Options, with_given
from sidecar.inject.places import NotInjectable

EXIT_REFUSED, EXIT_CONFIGURATION = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``inject``."""
    parser.add_argument(
        "-f", "--filename", action="append", required=True, metavar="FILE", help="a manifest; - is standard input"
    )
    parser.add_argument("-i", "--in-place", action="store_true", help="write the files instead of standard output")
    parser.add_argument("--diff", action="store_true", help="print what would change instead")
    parser.add_argument(
        "--set", action="append", default=[], metavar="CKPT_NAME=VALUE", help="any other setting of either container"
    )
    for flag in FLAGS:
        if flag.metavar is None:
            parser.add_argument(f"--{flag.name}", action="store_const", const="true", help=flag.text)
        else:
            parser.add_argument(f"--{flag.name}", metavar=flag.metavar, help=flag.text)


def run(arguments: argparse.Namespace) -> int:
    """Inject and return the exit code: 1 when a manifest is refused, 2 when an option is wrong. Nothing is written then."""
    try:
        options = options_from(arguments)
        done = [(name, text, _injected(name, text, options)) for name, text in map(_read, arguments.filename)]
    except (ConfigurationError, NotInjectable) as error:
        print(f"checkpoint-sidecar inject: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_REFUSED
    for name, _, result in done:
        for warning in result.warnings:
            print(f"warning: {name}: {warning}", file=sys.stderr)
    _write(arguments, done)
    return 0


def options_from(arguments: argparse.Namespace) -> Options:
    """Return the options, with every setting checked as the sidecar will check it at its start.

    Raises:
        ConfigurationError: One line that names the option and what it may be.
    """
    given = {flag.name: getattr(arguments, flag.field) for flag in FLAGS if getattr(arguments, flag.field) is not None}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("CKPT_"):
            raise ConfigurationError(f"--set {text}: must be CKPT_NAME=VALUE")
        given[name] = value
    options = with_given(Options(), given)
    from sidecar.settings import from_environment

    # What names files is for the pod to check: they are there, not here.
    known = {
        name: value for name, value in options.sidecar_settings().items() if name not in ("CKPT_CA_BUNDLE", "CKPT_NODE_INDEX")
    }
    from_environment({"CKPT_STORE": options.store or "s3://bucket/prefix", **known})
    return options


def _read(name: str) -> tuple[str, str]:
    try:
        return name, sys.stdin.read() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def _injected(name: str, text: str, options: Options) -> InjectedText:
    try:
        return inject_text(text, options)
    except NotInjectable as error:
        raise NotInjectable(": ".join(filter(None, (name, error.path))), error.why) from None


def _write(arguments: Any, done: list[tuple[str, str, InjectedText]]) -> None:
    for number, (name, old, result) in enumerate(done):
        if arguments.diff:
            lines = difflib.unified_diff(old.splitlines(), result.text.splitlines(), name, f"{name} (injected)", lineterm="")
            for line in lines:
                print(line)
        elif arguments.in_place and name != "-":
            if result.text != old:
                Path(name).write_bytes(result.text.encode())
        else:
            if number and not result.text.startswith("---"):
                print("---")
            print(result.text, end="")
