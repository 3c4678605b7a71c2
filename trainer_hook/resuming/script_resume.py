"""The checkpoint that a script looks for on the volume by itself: its download ends before the script looks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer_hook.contract import is_script_owned
from trainer_hook.process.client import Client, SidecarAbsent
from trainer_hook.process.log import info, warn
from trainer_hook.process.progress_bar import bar
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import LATEST, CannotResume
from trainer_hook.volume import lease

_awaited: set[int] = set()
"""Processes that have waited: a forked child has not."""


def await_download() -> None:
    """Wait until the newest checkpoint is on the volume, if a script saved it by itself; at most ``CKPT_RESUME_TIMEOUT_S``.

    Once in a process, and only beside a sidecar that runs. No session is opened: SIGTERM has the same effect as before.

    Raises:
        CannotResume: ``CKPT_ON_STORE_FAILURE=fail``, and the checkpoint is unknown.
        SettingError: A variable is invalid.
    """
    settings = from_environment(os.environ)
    if os.getpid() in _awaited or not lease.sidecar_holds(settings.dir):
        return
    _awaited.add(os.getpid())
    client = Client(settings.sidecar_url, settings.dir)
    try:
        answer = client.resume(
            LATEST, train_call=None, timeout_s=settings.resume_timeout_s, tell=info, bar=bar(), is_wanted=_may_be_scripts
        )
    except SidecarAbsent as absent:
        warn(f"{absent}: the script sees the checkpoints that are on the volume")
        return
    if answer.checkpoint is not None:
        if is_script_owned(answer.meta):
            info(f"{answer.checkpoint}, which the script saved, is on the volume")
        return
    if not answer.known:
        if settings.fail_without_store:
            warn(f"exits 1 because CKPT_ON_STORE_FAILURE=fail: {answer.detail}")
            raise CannotResume(1)
        warn(f"the script sees the checkpoints that are on the volume; there may be a newer one: {answer.detail}")


def _may_be_scripts(progress: Mapping[str, Any]) -> bool:
    """Whether a request may end with a checkpoint that a script saved by itself, as far as it has come."""
    return progress.get("state") != "downloading" or is_script_owned(progress.get("meta") or {})
