"""Verification of checkpoints by a person: one, the newest, or all of a prefix."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.core.commit.summary import StoredState
from sidecar.core.format.checkpoint_address import misnamed
from sidecar.errors import NothingFound
from sidecar.repository.verification import Examined, Verifier
from sidecar.standalone.session import OnBytes, StoreSession

_UNCOMMITTED = (StoredState.INCOMPLETE, StoredState.FOREIGN)


async def verified(
    session: StoreSession, checkpoint: str | None, *, every: bool, quick: bool, on_bytes: OnBytes
) -> list[Examined]:
    """Return checkpoints with all that is wrong with them.

    Args:
        session: The store.
        checkpoint: Its name; ``None``: the newest committed one.
        every: All committed ones instead.
        quick: Compare documents and sizes only.
        on_bytes: Shows progress.

    Raises:
        NothingFound: No such checkpoint is committed.
        StoreError: The store cannot be read now.
    """
    verifier = Verifier(session.store, session.executor)
    found = []
    for name in [checkpoint] if checkpoint else await verifier.committed():
        examined = await verifier.examine(name)
        if examined.state in _UNCOMMITTED:
            if checkpoint:
                raise NothingFound(f"{session.store.url}/{name}: not committed, so there is nothing to compare with")
            continue
        found.append(examined)
        if not quick:
            await verifier.read_all(examined, _counted(examined, on_bytes))
        if not every:
            break
    if not found:
        raise NothingFound(f"{session.store.url}: no checkpoint is committed{misnamed(session.store.url)}")
    return found


def _counted(examined: Examined, on_bytes: OnBytes) -> Callable[[int], None]:
    total, done = sum(examined.sizes().values()), 0

    def on_read(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        on_bytes(examined.name, min(done, total), total)

    return on_read
