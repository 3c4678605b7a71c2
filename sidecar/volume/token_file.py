"""The API's bearer token on the volume, new at each start."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import structlog

from sidecar.volume.files import FULL
from sidecar.volume.opener import Place

log = structlog.get_logger()

RETRY_S = 1.0
_MODE = 0o640
_FOLDER_MODE = 0o2775
"""Of the system directory: trainer and sidecar may be different users of one group."""


class TokenFile:
    """The token's file. On a full volume the write is retried and does not end the sidecar: uploads have to continue.

    It is written again where it was deleted, such as by a script that empties its output folder: without it, the hook takes
    this sidecar for that of another volume.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.token = secrets.token_urlsafe(32)
        self.is_late = False
        """Whether the volume is full, so that the token is not written yet."""

    def accepts(self, authorization: str | None, *, is_required: bool) -> bool:
        """Whether a call with this header may be answered.

        A wrong token is refused also where none is required: it is that of another volume, whose job uses the same port.
        """
        if self.is_late and not is_required:
            return True
        if authorization is None or not authorization.startswith("Bearer "):  # such as the password of a proxy before the page
            return not is_required
        return secrets.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def publish(self) -> None:
        """Write the token, or set ``is_late`` if the volume is full.

        Raises:
            OSError: The volume is not writable.
        """
        try:
            self._place.publish(self.token.encode(), mode=_MODE)
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

    def keep(self) -> None:
        """Write the token again if it was deleted. Where the volume fails, nothing is known of its files."""
        with suppress(OSError):
            try:
                self._place.status()
            except FileNotFoundError:
                self._place.parent.own_folder(_FOLDER_MODE)
                self.publish()
