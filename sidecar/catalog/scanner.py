"""Scanner of finished checkpoints: reads each marker's version, and the files only if the version is new."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.commit.resume import newest_first
from sidecar.core.format.attempts import first_found
from sidecar.core.format.found_checkpoint import FoundCheckpoint, Identity, is_whole, judge, may_lack_files
from sidecar.core.format.key_limits import KeyLimits, check_keys
from sidecar.core.lifecycle.states import PENDING, REPORTED, SETTLED, State
from sidecar.errors import CheckpointRejected
from sidecar.volume.files import DENIED, why_refused
from sidecar.volume.opener import Place
from sidecar.volume.pins import Disappeared
from sidecar.volume.volume import Volume
from sidecar.volume.walk import written_at_s
from trainer_hook.contract import ContractError

log = structlog.get_logger()


SETTLE_S = 0.25
"""Seconds for which an empty or malformed marker must stay unchanged: a shell's ``echo … > .complete`` is briefly empty."""
DELETION_S = 2.0
"""Seconds without a change after which a checkpoint that may lack files is judged: a rotation, or a copy, may be under way."""
TROUBLE_S = 5.0
"""Seconds after which an unreadable checkpoint is shown as rejected. Each scan examines it again, before and afterwards."""
UNKNOWN = "unknown"
"""Version of a marker that could never be read."""
_NEEDS_FILES = PENDING - {State.UPLOADED}
"""States in which files are still to be sent. Once uploaded, this node's part is in the store."""


class _TransientErrors:
    """Names that could not be read, with the time of the first failure (monotonic). Logged once per name."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def add(self, name: str, error: OSError) -> None:
        if name not in self._since_s:
            self._since_s[name] = time.monotonic()
            log.warning("checkpoint_not_readable_now", checkpoint=name, error=str(error), hint="examined again at each scan")

    def clear(self, name: str) -> None:
        self._since_s.pop(name, None)

    def names(self) -> set[str]:
        return set(self._since_s)

    def is_fresh(self, name: str) -> bool:
        return time.monotonic() - self._since_s.get(name, float("-inf")) < TROUBLE_S

    def any_is_fresh(self) -> bool:
        return any(self.is_fresh(name) for name in self._since_s)


class Scanner:
    """A scan of an unchanged volume costs one ``lstat`` per checkpoint; new checkpoints are walked and pinned in a thread."""

    def __init__(self, volume: Volume, catalog: Catalog, identity: Callable[[], Identity], limits: KeyLimits) -> None:
        """``identity``: node and attempt for markers without them. ``limits``: of the store."""
        self._limits = limits
        self._volume = volume
        self._catalog = catalog
        self._identity = identity
        self._one_at_a_time = asyncio.Lock()
        self._examining = False
        self.volume_error: str | None = None
        """Why the last scan could not read the volume; ``None``: it could."""
        self._seen: dict[str, str] = {}
        """Marker version of all examined checkpoints, by name."""
        self._unsettled: dict[str, tuple[FoundCheckpoint, float]] = {}
        """Checkpoints that may still be changing, with the time (monotonic) since which they look so."""
        self._again: set[str] = set()
        """Names whose files changed under the same marker."""
        self._scans = 0
        self._there_before: set[str] = set()
        """Names that the first scan found and that were not admitted to the catalog yet."""
        self.found_in: dict[str, int] = {}
        """The scan that found each attempt's first checkpoint, as in ``Seen.found_in``."""
        self._unreadable = _TransientErrors()
        self._earlier_pins: list[Place] = []
        """Pins of an earlier process that were neither admitted nor dropped yet."""
        self._unpinnable = _TransientErrors()

    async def take_over_pins(self) -> bool:
        """Continue with the checkpoints that an earlier sidecar process pinned, also if the trainer has deleted them since.

        Returns:
            False if the pins cannot be listed now.
        """
        async with self._one_at_a_time:
            try:
                self._earlier_pins = await asyncio.to_thread(self._volume.pins.of_earlier_process)
            except OSError as error:
                self._cannot_read(error)
                return False
            await self._admit_pins()
        with contextlib.suppress(OSError):  # they are small
            await asyncio.to_thread(self._volume.drop_stray_journals)
        return True

    async def _admit_pins(self) -> None:
        found = [(place, pinned) for place in self._earlier_pins[:] if (pinned := await self._examine_pin(place)) is not None]
        names = newest_first({pinned.name for _, pinned in found}, and_final=True)
        for place, pinned in sorted(found, key=lambda pair: (names.index(pair[1].name), -pair[1].marker.mtime_s)):
            try:
                await self._admit_or_drop_pin(place, pinned)
                self._earlier_pins.remove(place)  # not before: an error or a cancellation would lose it
                self._unpinnable.clear(place.name)
            except OSError as error:
                self._try_pin_again(place, error)

    async def _admit_or_drop_pin(self, place: Place, pinned: FoundCheckpoint) -> None:
        version, known = pinned.marker.version, self._catalog.get(pinned.name)
        if version in self._identity().foreign:  # left as it is: it may be the other run's only copy
            return
        current = self._volume.read_marker_version(pinned.name)
        is_newest = current in (None, version) and (known is None or known.version in (version, UNKNOWN))
        if is_newest and self._volume.pins.holds_its_version(place, pinned):
            self._there_before.add(pinned.name)
            await self._admit(pinned)
        else:
            # Admitted later, after the newer version has left the volume, it would replace that version in the store.
            log.info("pin_dropped", pin=place.name, reason="the checkpoint was written anew since")
            await asyncio.to_thread(self._volume.pins.drop, place)
            self._volume.drop_journal(place)

    async def _examine_pin(self, place: Place) -> FoundCheckpoint | None:
        try:
            return await asyncio.to_thread(self._volume.pins.examine, place)
        except FileNotFoundError:
            await asyncio.to_thread(self._volume.pins.drop, place)
            self._earlier_pins.remove(place)
        except CheckpointRejected as error:  # left as it is: it may be the only copy
            self._earlier_pins.remove(place)
            log.error("pin_not_readable", pin=place.name, error=str(error), hint="make its files readable and start again")
        except OSError as error:
            self._try_pin_again(place, error)
        return None

    def _try_pin_again(self, place: Place, error: OSError) -> None:
        self._unpinnable.add(place.name, error)
        if not self._unpinnable.is_fresh(place.name):
            self._show_unreadable(place.name.partition("@")[0], f"its links cannot be read: {_why_later(error)}")

    @property
    def unsettled(self) -> bool:
        """Whether another scan is needed soon."""
        return (
            bool(self._unsettled or self._again)
            or self._examining
            or self._unreadable.any_is_fresh()
            or self._unpinnable.any_is_fresh()
        )

    def unsettled_names(self) -> list[str]:
        """Return the checkpoints that may still be changing."""
        return sorted({*self._unsettled, *self._again})

    def foreign_names(self) -> list[str]:
        """Return the checkpoints that other runs left on the volume, newest first."""
        foreign = self._identity().foreign
        try:
            return newest_first(
                name for name in self._volume.names() if foreign and self._volume.marker_version(name) in foreign
            )
        except OSError:
            return []

    async def scan(self) -> None:
        """Scan the volume once. A failure to read it is logged once, and retried by the next scan."""
        async with self._one_at_a_time:
            await self._scan()

    async def _scan(self) -> None:
        try:
            names = set(self._volume.names())
        except OSError as error:
            self._cannot_read(error)
            return
        self.volume_error = None
        self._scans += 1
        if self._scans == 1:
            self._there_before |= names
        versions = self._marker_versions(names)
        for name in newest_first(names, and_final=True):
            version = versions.get(name)
            if version is not None and self._seen.get(name) != version:
                self._examining = True
                try:
                    await self._examine(name, version)
                finally:
                    self._examining = False
        for name in [n for n in self._examined() if n not in names or versions.get(n, "") is None]:
            self._disappeared(name)
        if self._earlier_pins:  # last: an error of theirs delays no new checkpoint
            await self._admit_pins()

    def _cannot_read(self, error: OSError) -> None:
        if self.volume_error is None:
            log.error("volume_not_readable", error=str(error), hint="is the volume still mounted?")
        self.volume_error = str(error)

    def _marker_versions(self, names: set[str]) -> dict[str, str | None]:
        """Return the version of each marker, ``None``: there is none. Left out: those of other runs, and unreadable ones."""
        versions: dict[str, str | None] = {}
        foreign = self._identity().foreign
        for name in names:
            try:
                version = self._volume.read_marker_version(name)
                if version not in foreign:
                    versions[name] = version
            except OSError as error:
                self._unreadable.add(name, error)
                if not self._unreadable.is_fresh(name):
                    self._show_unreadable(name, f"whether it has a marker cannot be read: {_why_later(error)}")
        return versions

    def _show_unreadable(self, name: str, reason: str) -> None:
        if self._catalog.get(name) is None:
            self._catalog.rejected(name, UNKNOWN, reason, marked_at_s=time.time())

    def _examined(self) -> set[str]:
        return {*self._seen, *self._unsettled, *self._again, *self._unreadable.names()}

    def examine_again(self, name: str) -> None:
        """Examine a checkpoint again at the next scan: its files changed under the same marker."""
        self._seen.pop(name, None)
        self._again.add(name)

    async def _examine(self, name: str, version: str) -> None:
        try:
            found = await asyncio.to_thread(self._volume.examine, name)
            if self._is_settled(found):
                await self._admit(found)
        except FileNotFoundError:  # it is just being deleted
            return
        except CheckpointRejected as error:
            self._seen[name] = version
            self._unsettled.pop(name, None)
            self._reject(name, version, str(error))
        except OSError as error:
            self._examine_later(name, version, error)
            return
        self._again.discard(name)
        self._unreadable.clear(name)

    def _examine_later(self, name: str, version: str, error: OSError) -> None:
        self._unsettled.pop(name, None)
        self._again.discard(name)
        self._unreadable.add(name, error)
        known = self._catalog.get(name)
        if not self._unreadable.is_fresh(name) and known is None:
            self._reject(name, version, _why_later(error))

    def _reject(self, name: str, version: str, reason: str) -> None:
        self._catalog.rejected(name, version, reason, marked_at_s=written_at_s(version))

    def _is_settled(self, found: FoundCheckpoint) -> bool:
        """Whether it may be admitted now: its marker is whole, or it has not changed for long enough."""
        marker_s = 0.0 if is_whole(found.marker.content) else SETTLE_S
        quiet_s = DELETION_S if may_lack_files(found) else marker_s
        before, since_s = self._unsettled.get(found.name) or (None, 0.0)
        if quiet_s and before != found:
            self._unsettled[found.name] = (found, time.monotonic())
            return False
        if time.monotonic() - since_s < quiet_s:
            return False
        self._unsettled.pop(found.name, None)
        return True

    async def _admit(self, found: FoundCheckpoint) -> None:
        self._unsettled.pop(found.name, None)  # the scan may wait for a checkpoint whose pin is admitted
        known = self._catalog.get(found.name)
        if known is not None and known.version == found.marker.version and self._is_admitted(known):
            self._seen[found.name] = found.marker.version
            return
        if known is not None and known.checkpoint is not None:
            await asyncio.to_thread(self._volume.pins.release, known.checkpoint)
        try:
            checkpoint = judge(found, self._identity())
            if checkpoint.restored_from is None:
                was_there = checkpoint.name in self._there_before
                number = first_found(self._scans, was_there=was_there, is_inherited=checkpoint.is_inherited)
                self.found_in.setdefault(checkpoint.attempt, number)
            check_keys(checkpoint, self._limits)
            # Held at once, before the trainer's next rotation.
            pin = None if checkpoint.restored_from else await asyncio.to_thread(self._volume.pins.hold, checkpoint)
        except Disappeared as error:
            if self._is_withdrawn(found.name):
                return
            self._catalog.move(self._catalog.finished(checkpoint, held=False), State.LOST, reason=str(error))
        except (ContractError, CheckpointRejected) as error:
            self._reject(found.name, found.marker.version, str(error))
        else:
            self._catalog.finished(checkpoint, held=pin is None or pin.held)
        # Last: if the volume fails while the files are pinned, the next scan tries again.
        self._seen[found.name] = found.marker.version
        self._there_before.discard(found.name)

    def _is_withdrawn(self, name: str) -> bool:
        """Whether the trainer has removed the marker alone, to write the files anew."""
        return self._volume.read_marker_version(name) is None and (self._volume / name).is_folder()

    def _is_admitted(self, known: Tracked) -> bool:
        """Whether this version is in the catalog and needs no examination: not lost, and not requested again."""
        return known.checkpoint is not None and known.state is not State.LOST and known.name not in self._again

    def _disappeared(self, name: str) -> None:
        known, is_lost = self._catalog.get(name), False
        if known is not None and known.checkpoint is not None and known.state in _NEEDS_FILES:
            try:
                is_lost = not self._volume.pins.holds(known.checkpoint)
            except OSError:  # the volume failed: the next scan asks again
                return
        self._seen.pop(name, None)
        self._unsettled.pop(name, None)
        self._again.discard(name)
        self._unreadable.clear(name)
        if known is not None and is_lost:
            self._catalog.move(known, State.LOST, reason="deleted before it was uploaded, and it could not be held by links")
        elif known is not None and known.state in SETTLED - REPORTED:
            self._catalog.forget(name)


def _why_later(error: OSError) -> str:
    why = why_refused(str(error.filename), error) if error.errno in DENIED else error.strerror or error
    return f"{why}; it is examined again at each scan"
