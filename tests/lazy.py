"""Modules that a few tests need, imported by the first use of one of their names.

Every process of a test run collects all tests: PyTorch and the Kubeflow SDK would cost each of them seconds and 500 MB.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when the first of its attributes is asked for; attributes can be submodules."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # asked for by pytest, of whatever it finds in a module
            raise AttributeError(attribute)
        module = importlib.import_module(self._name)
        try:
            return getattr(module, attribute)
        except AttributeError:
            return importlib.import_module(f"{self._name}.{attribute}")
