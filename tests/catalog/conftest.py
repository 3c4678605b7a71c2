"""A volume that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.volume.opener import Folder

Failing = Callable[[str, int], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Let opening fail for paths that contain a text; the empty text ends it."""
    real, now = Folder.open, ["", 0]

    def fail(text: str, number: int = errno.EMFILE) -> None:
        now[:] = [text, number]

    def opened(folder: Folder, inside: str, *args: Any) -> int:
        path = f"{folder.path}/{inside}"
        if now[0] and str(now[0]) in path:
            raise OSError(now[1], os.strerror(int(now[1])), path)
        return real(folder, inside, *args)

    monkeypatch.setattr(Folder, "open", opened)
    return fail
