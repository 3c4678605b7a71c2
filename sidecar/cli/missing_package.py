"""What to install when a package is missing."""

from __future__ import annotations

_OURS = ("", "sidecar", "trainer_hook")


def not_installed(error: ModuleNotFoundError) -> str:
    """Return what to install.

    Raises:
        ModuleNotFoundError: ``error``, if a part of this program is what is missing.
    """
    package = (error.name or "").partition(".")[0]
    if package in _OURS:
        raise error
    return f"the package {package} is not installed: pip install 'checkpoint-sidecar[sidecar]'"
