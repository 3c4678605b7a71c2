"""Work on a volume that fails for a while."""

from __future__ import annotations

import errno
import os

import pytest

from sidecar.core.format import obstacles
from sidecar.volume.retry import retried


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstacles, "RETRY_S", (0.0, 0.0, 0.0))


class Volume:
    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    async def work(self, answer: str) -> str:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return answer


async def test_work_is_done_once_the_volume_is_back() -> None:
    assert await retried(Volume(errno.ESTALE, errno.EIO, errno.ENOTCONN).work, "done") == "done"


@pytest.mark.parametrize(("errors", "left"), [([errno.EIO] * 5, 1), ([errno.ENOSPC], 0), ([errno.ESTALE, errno.EACCES], 0)])
async def test_the_last_error_is_raised(errors: list[int], left: int) -> None:
    volume = Volume(*errors)
    with pytest.raises(OSError, match=os.strerror(errors[-1])):
        await retried(volume.work, "done")
    assert len(volume.errors) == left
