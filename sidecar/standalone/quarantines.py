"""Quarantine records of a prefix: which commits failed verification, and their release."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.core.commit.summary import StoredState
from sidecar.core.format import keys
from sidecar.core.format.manifest import Quarantined, decode
from sidecar.errors import NotFound, NothingFound, OversizedDocument
from sidecar.standalone.listing import ListedCheckpoint, Listing
from sidecar.standalone.session import StoreSession
from trainer_hook.contract import ContractError


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """One record."""

    checkpoint: str
    key: str
    reason: str
    at: str | None
    node: str | None
    applies: bool
    """It is about the present commit, not about an earlier one of this step, and in force."""


async def quarantines(session: StoreSession, *, checkpoint: str | None = None) -> list[QuarantineRecord]:
    """Return the records of all checkpoints, newest step first, or those of one.

    Raises:
        StoreError: A request failed.
    """
    listing = Listing(session.store, session.executor)
    listed = await (listing.checkpoints([checkpoint], newest=1) if checkpoint else listing.checkpoints())
    works = [_record(session, each, key) for each in listed for key in each.summary.quarantines]
    return [record for record in await session.executor.together(works) if record is not None]


async def _record(session: StoreSession, listed: ListedCheckpoint, key: str) -> QuarantineRecord | None:
    name, commit = listed.summary.name, listed.commit
    applies = listed.state is StoredState.BAD and commit is not None and key == keys.quarantined(name, commit.crc64nvme)
    try:
        found = decode(Quarantined, await session.executor.persistently(session.store.get, key), key=key)
    except NotFound:
        return None
    except (ContractError, OversizedDocument) as error:
        return QuarantineRecord(name, key, f"its record cannot be read: {error}", None, None, applies)
    return QuarantineRecord(name, key, found.reason, found.at, found.node, applies)


async def release(session: StoreSession, checkpoint: str) -> list[QuarantineRecord]:
    """Delete the records of a checkpoint, so that the next resume tries it again, and verifies it.

    Raises:
        NothingFound: It has none.
        StoreError: A request failed.
    """
    found = await quarantines(session, checkpoint=checkpoint)
    if not found:
        raise NothingFound(f"{session.store.url}/{checkpoint}: it is not bad")
    await session.executor.persistently(session.store.delete, [record.key for record in found])
    return found
