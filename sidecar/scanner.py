"""Finds what the trainer finished: looks at each checkpoint's marker, and at its files only when the marker is new."""

from __future__ import annotations

import asyncio
import time

import structlog

from sidecar.catalog import Catalog
from sidecar.core.local import FoundCheckpoint, Identity, is_whole, judge
from sidecar.core.resume import newest_first
from sidecar.core.states import SETTLED, State
from sidecar.errors import CheckpointRejected
from sidecar.volume import Volume
from trainer_hook.contract import ContractError

log = structlog.get_logger()


SETTLE_S = 0.25
"""An empty or unreadable marker must stay as it is this long: a shell's ``echo … > .complete`` is empty for a moment."""


class Scanner:
    """A scan of an unchanged volume costs one ``lstat`` per checkpoint; what is new is walked and held in a thread."""

    def __init__(self, volume: Volume, catalog: Catalog, identity: Identity) -> None:
        self._volume = volume
        self._catalog = catalog
        self._identity = identity
        self._one_at_a_time = asyncio.Lock()
        self._examining = False
        self._readable = True
        self._seen: dict[str, str] = {}
        """Marker version by name, of all that was examined."""
        self._unsettled: dict[str, tuple[str, float]] = {}
        """Marker version and when it was first seen (monotonic), of markers that may still be being written."""

    async def take_over_pins(self) -> None:
        """Continue with what an earlier life of the sidecar held, also where the trainer has deleted it since."""
        pinned = {found.name: found for found in await asyncio.to_thread(lambda: list(self._volume.pinned()))}
        for found in (pinned[name] for name in newest_first(pinned, and_final=True)):
            if self._volume.marker_signature(found.name) in (None, found.marker.signature):
                await self._take(found)

    @property
    def unsettled(self) -> bool:
        """Whether some marker has to be looked at again soon."""
        return bool(self._unsettled) or self._examining

    async def scan(self) -> None:
        """Look at the volume once. One that cannot be read is said once, and looked at again at the next scan."""
        async with self._one_at_a_time:
            await self._scan()

    async def _scan(self) -> None:
        try:
            names = set(self._volume.names())
        except OSError as error:
            if self._readable:
                log.error("volume_not_readable", error=str(error), hint="is the volume still mounted?")
            self._readable = False
            return
        self._readable = True
        for name in newest_first(names, and_final=True):
            signature = self._volume.marker_signature(name)
            if signature is not None and self._seen.get(name) != signature:
                self._examining = True
                try:
                    await self._examine(name, signature)
                finally:
                    self._examining = False
        for name in [n for n in self._seen if n not in names or self._volume.marker_signature(n) is None]:
            self._disappeared(name)

    def examine_again(self, name: str) -> None:
        """Forget what was seen of a checkpoint: its files changed under the same marker."""
        self._seen.pop(name, None)

    async def _examine(self, name: str, signature: str) -> None:
        try:
            found = await asyncio.to_thread(self._volume.examine, name)
            if not self._is_settled(found):
                return
            await self._take(found)
        except FileNotFoundError:  # it is just being deleted
            return
        except (CheckpointRejected, OSError) as error:
            self._seen[name] = signature
            self._catalog.rejected(name, signature, str(error))

    def _is_settled(self, found: FoundCheckpoint) -> bool:
        if is_whole(found.marker.content):
            self._unsettled.pop(found.name, None)
            return True
        before, since_s = self._unsettled.get(found.name, ("", 0.0))
        if before != found.marker.signature:
            self._unsettled[found.name] = (found.marker.signature, time.monotonic())
            return False
        if time.monotonic() - since_s < SETTLE_S:
            return False
        del self._unsettled[found.name]
        return True

    async def _take(self, found: FoundCheckpoint) -> None:
        self._seen[found.name] = found.marker.signature
        known = self._catalog.get(found.name)
        if known is not None and known.version == found.marker.signature:
            return
        if known is not None and known.checkpoint is not None:
            await asyncio.to_thread(self._volume.unpin, known.checkpoint)
        try:
            checkpoint = judge(found, self._identity)
            # Held at once, before the trainer's next rotation.
            pin = None if checkpoint.restored_from else await asyncio.to_thread(self._volume.pin, checkpoint)
        except (ContractError, CheckpointRejected, OSError) as error:
            self._catalog.rejected(found.name, found.marker.signature, str(error))
            return
        self._catalog.finished(checkpoint, held=pin is None or pin.held)

    def _disappeared(self, name: str) -> None:
        self._seen.pop(name, None)
        self._unsettled.pop(name, None)
        known = self._catalog.get(name)
        if known is None:
            return
        if known.state in SETTLED:
            self._catalog.forget(name)
        elif known.checkpoint is not None and not self._volume.pin(known.checkpoint).held:
            self._catalog.move(known, State.LOST, reason="deleted before it was uploaded, and it could not be held by links")
