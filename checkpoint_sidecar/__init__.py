"""What programs import of checkpoint-sidecar, beside ``trainer_hook`` in a training script.

``checkpoint_sidecar.kubeflow``: durable training from a notebook with the Kubeflow SDK.
"""

from __future__ import annotations

from checkpoint_sidecar._installed import check_import_name

check_import_name()

from sidecar import __version__  # noqa: E402 - the check comes first

__all__ = ["__version__"]
