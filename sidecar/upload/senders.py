"""Makes what carries a checkpoint to the store: its bodies behind the flush's turnstile, its progress told to whoever asks."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.catalog import Tracked
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer import Transfers
from sidecar.upload.bodies import Bodies, Source
from sidecar.upload.committing import Committer
from sidecar.upload.fence import Fence
from sidecar.upload.flushing import Flush
from sidecar.upload.journal import Journal
from sidecar.upload.sending import Sending
from sidecar.upload.unchanged import Unchanged
from sidecar.volume.unfinished import Unfinished


class Senders:
    """All of them share one link, one set of threads, and what is known of files that did not change."""

    def __init__(
        self,
        *,
        store: Store,
        capabilities: Capabilities,
        transfers: Transfers,
        committer: Committer,
        flush: Flush,
        unchanged: Unchanged,
        on_change: Callable[[], None],
        on_sent_in_vain: Callable[[], None],
    ) -> None:
        self._store = store
        self._can = capabilities
        self._transfers = transfers
        self._committer = committer
        self._flush = flush
        self._unchanged = unchanged
        self._on_change = on_change
        self._on_sent_in_vain = on_sent_in_vain

    def bodies(self, name: str, source: Source) -> Bodies:
        """Return what reads the files of a checkpoint, and holds them while something else goes first."""
        return Bodies(name=name, source=source, store=self._store, capabilities=self._can, gate=self._flush.turnstile(name))

    def early(self, name: str, source: Unfinished, journal: Journal) -> Sending:
        """Return what carries files of a checkpoint that the trainer still writes."""
        return self.sending(name, source, journal, fence=Fence(self._committer, name, ""))

    def sending(self, name: str, source: Source, journal: Journal, *, fence: Fence, tracked: Tracked | None = None) -> Sending:
        """Return what carries a checkpoint.

        Args:
            name: Of the checkpoint.
            source: Its files.
            journal: What is in the store already.
            fence: Passed before each request that writes.
            tracked: Where to say how much arrived.
        """
        arrived = self._flush.progressed(name)

        def progressed(sent_bytes: int) -> None:
            arrived(sent_bytes)
            if tracked is not None:
                tracked.sent_bytes = sent_bytes

        sending = Sending(
            name=name,
            bodies=self.bodies(name, source),
            store=self._store,
            capabilities=self._can,
            transfers=self._transfers,
            journal=journal,
            unchanged=self._unchanged,
            fence=fence.pass_through,
            on_progress=progressed,
            on_change=self._on_change,
            on_sent_in_vain=self._on_sent_in_vain,
        )
        arrived(sending.sent_bytes())  # what came before is not counted
        return sending
