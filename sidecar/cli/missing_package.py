"""What to install when a package is missing."""

from __future__ import annotations

_OURS = ("", "sidecar", "trainer_hook")
_EXTRAS = {"inject": "inject", "kubectl-ckpt": "kubectl"}
"""The extra of a command that does not need all of the sidecar's packages."""
_WITHOUT_TYPER = ("", "status", "ls", "probe", "drain")
"""Commands of which a base install has the plain form; the empty text stands for ``--help``."""


def not_installed(error: ModuleNotFoundError, command: str = "") -> str:
    """Return what to install for a command.

    Raises:
        ModuleNotFoundError: ``error``, if a part of this program is what is missing.
    """
    package = (error.name or "").partition(".")[0]
    if package in _OURS:
        raise error
    said = f"the package {package} is not installed: pip install 'checkpoint-sidecar[{_EXTRAS.get(command, 'sidecar')}]'"
    if package == "typer" and command in _WITHOUT_TYPER:
        said += "; without it there are status, ls, probe, drain and --version, with no option but --json"
    return said
