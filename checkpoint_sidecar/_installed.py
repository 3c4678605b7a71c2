"""Says it when another distribution has taken the import name ``sidecar``, as the Jupyter widget of that name does."""

from __future__ import annotations

from importlib.util import find_spec


def check_import_name() -> None:
    """Check that ``sidecar`` is this project's.

    Raises:
        ImportError: It is another one's, or is mixed with it.
    """
    try:
        found = find_spec("sidecar.kubernetes.inject") is not None and find_spec("sidecar.core.job") is not None
    except ImportError:
        found = False
    if not found:
        raise ImportError(
            "the import name 'sidecar' belongs to another distribution here, such as the Jupyter widget 'sidecar': "
            "pip uninstall sidecar, then pip install --force-reinstall --no-deps checkpoint-sidecar"
        )
