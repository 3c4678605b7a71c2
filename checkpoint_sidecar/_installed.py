"""Says it when another distribution has taken the import name ``sidecar``, as the Jupyter widget of that name does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_import_name() -> None:
    """Check that ``sidecar`` is this project's.

    Raises:
        ImportError: It is another one's, or is mixed with it.
    """
    if not _is_beside_this() or not _is_whole():
        raise ImportError(
            "the import name 'sidecar' belongs to another distribution here, such as the Jupyter widget 'sidecar': "
            "pip uninstall sidecar, then pip install --force-reinstall --no-deps checkpoint-sidecar"
        )


def _is_beside_this() -> bool:
    """Whether it lies in the same folder as this package. An editable installation finds its modules also in another one's."""
    found = find_spec("sidecar")
    return found is not None and found.origin is not None and Path(found.origin).parents[1] == Path(__file__).parents[1]


def _is_whole() -> bool:
    try:
        return find_spec("sidecar.kubernetes.inject") is not None and find_spec("sidecar.core.job") is not None
    except ImportError:
        return False
