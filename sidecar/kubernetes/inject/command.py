"""``checkpoint-sidecar inject``: files or standard input in, standard output or the files out."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.manifests import InjectedText, inject_text
from sidecar.kubernetes.inject.options import Options, with_given
from sidecar.kubernetes.inject.reports import NotInjectable


def run(filenames: Sequence[str], options: Options, *, in_place: bool, diff: bool) -> None:
    """Inject into files; ``-`` is standard input. When one is refused, nothing is written.

    Raises:
        ConfigurationError: A file cannot be read.
        NotInjectable: A manifest is refused.
    """
    done = [(name, text, _injected(name, text, options)) for name, text in map(_read, filenames)]
    for name, _, result in done:
        _print_warnings(name, result)
    for number, (name, old, result) in enumerate(done):
        if diff:
            _print_difference(name, old, result.text)
        elif in_place and name != "-":
            if result.text != old:
                Path(name).write_bytes(result.text.encode())
        else:
            if number and not result.text.startswith("---"):
                print("---")
            print(result.text, end="")


def options_from(flags: Mapping[str, str], settings: Iterable[str]) -> Options:
    """Return the options, with every setting checked as the sidecar will check it at its start.

    ``flags``: text by name with dashes. ``settings``: ``CKPT_NAME=VALUE`` each.

    Raises:
        ConfigurationError: One line that names the option and what it may be.
    """
    given = dict(flags)
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("CKPT_"):
            raise ConfigurationError(f"--set {text}: must be CKPT_NAME=VALUE")
        given[name] = value
    options = with_given(Options(), given)
    from sidecar.daemon.settings import from_environment

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


def _print_warnings(name: str, result: InjectedText) -> None:
    """Print each text once, with all of its places: what is said of one replica is often said of the others, too."""
    places: dict[str, list[str]] = {}
    for warning in result.warnings:
        places.setdefault(warning.text, []).append(warning.path)
    for text, paths in places.items():
        print(f"warning: {name}: {', '.join(paths)}: {text}", file=sys.stderr)


def _print_difference(name: str, old: str, new: str) -> None:
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), name, f"{name} (injected)", lineterm=""):
        print(line)
