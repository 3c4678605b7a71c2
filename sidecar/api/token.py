"""The API's bearer token on the volume, new at each start."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.volume.files import FULL
from sidecar.volume.opener import Place

log = structlog.get_logger()

RETRY_S = 1.0
_MODE = 0o640


class TokenFile:
    """The token's file. On a full volume the write is retried and does not end the sidecar: uploads have to continue."""

    def __init__(self, place: Place, token: str) -> None:
        self._place = place
        self._token = token.encode()
        self.is_late = False
        """Whether the volume is full, so that the token is not written yet."""

    def publish(self) -> None:
        """Write the token, or set ``is_late`` if the volume is full.

        Raises:
            OSError: The volume is not writable.
        """
        try:
            self._place.publish(self._token, mode=_MODE)
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self.is_late:
                hint = "free space or make the volume larger; tried again until then"
                log.warning("token_not_written", path=str(self._place), error=error.strerror, hint=hint)
            self.is_late = True
        else:
            self.is_late = False

    async def run(self) -> None:
        """Retry until the token is written, then wait until cancelled."""
        while self.is_late:
            await asyncio.sleep(RETRY_S)
            self.publish()
        await asyncio.Event().wait()
