"""One run per prefix: ``run.json`` at the store's root holds the run's id."""

from __future__ import annotations

import json
import uuid

from sidecar.core import keys
from sidecar.errors import AlreadyExists, ConfigurationError, NotFound
from sidecar.store.protocol import Store
from trainer_hook.contract import FORMAT, encode_json


def claim(store: Store, *, run_id: str | None) -> str:
    """Return the id of the run that owns the prefix, after writing it where there was none. Blocks.

    Args:
        store: The opened store.
        run_id: The run that this pod belongs to; ``None`` joins whatever run is there.

    Raises:
        ConfigurationError: The prefix belongs to another run, or its ``run.json`` cannot be read.
    """
    try:
        return _owner(store, run_id)
    except NotFound:
        mine = run_id or uuid.uuid4().hex[:12]
        try:
            store.put(keys.RUN, encode_json({"format": FORMAT, "run_id": mine}), only_if_absent=True)
        except AlreadyExists:  # another node was faster
            return _owner(store, run_id)
        return mine


def _owner(store: Store, run_id: str | None) -> str:
    raw = store.get(keys.RUN)
    try:
        owner = json.loads(raw)["run_id"]
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"{store.url}/{keys.RUN} is not this system's: choose an empty prefix in CKPT_STORE") from None
    if run_id is not None and owner != run_id:
        raise ConfigurationError(
            f"{store.url} belongs to run {str(owner)[:80]!r}, this pod is of run {run_id!r}: "
            "give each run its own prefix in CKPT_STORE"
        )
    return str(owner)
