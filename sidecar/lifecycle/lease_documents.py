"""Documents of the lease in the store: ``run.json``, the claims, and the request for a sign of life."""

from __future__ import annotations

from contextlib import suppress

import structlog

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import Arrival, Claim, Claimed, Holder, claims_among, decode_claim, seconds_of
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.run_document import encode_run
from sidecar.errors import AlreadyExists, LaterRun, NotFound, OversizedDocument, UnreadableRun
from sidecar.lifecycle.pod import LeasedPod
from sidecar.lifecycle.run_document import MAX_RUN_BYTES, read
from sidecar.store.protocol import Store
from trainer_hook.contract import FORMAT, encode_json

log = structlog.get_logger()


class LeaseDocuments:
    """Reads and writes the documents of the lease. All calls block."""

    def __init__(self, store: Store) -> None:
        """Start without a run."""
        self._store = store
        self.url = store.url
        self.run = Run("")
        """The run as it was read or written last."""
        self.is_missing = False
        """Whether ``run.json`` was deleted or damaged, so that the holder has to write it again."""

    def read_run(self, *, repairs: bool = False) -> Run:
        """Return the run in the store; if it was deleted, the last known one, which the holder then writes again.

        ``repairs``: treat a document that cannot be read as a deleted one. Only for the holder, which proved with its claim
        that the prefix is this system's.

        Raises:
            UnreadableRun: The document cannot be read, and this pod does not write it again.
        """
        try:
            self.run = read(self._store)
        except NotFound:
            self._report_missing("run_document_missing", "it is written again; nothing but this system should delete it")
        except UnreadableRun as error:
            if not repairs or isinstance(error, LaterRun):
                raise
            self._report_missing("run_document_damaged", "it is written again; nothing but this system should write it", error)
        else:
            self.is_missing = False
        return self.run

    def _report_missing(self, event: str, hint: str, error: UnreadableRun | None = None) -> None:
        if not self.is_missing:
            log.warning(event, key=f"{self._store.url}/{keys.RUN}", hint=hint, **({"error": str(error)} if error else {}))
        self.is_missing = True

    def write(self, run: Run) -> None:
        """Write ``run.json``."""
        self._store.put(keys.RUN, encode_run(run))
        self.run, self.is_missing = run, False

    def claims(self) -> list[Claim]:
        """Return all claims, the holder's last."""
        return claims_among((stored.key, stored.modified) for stored in self._store.list(keys.CLAIMS))

    def claimed(self, claim: Claim) -> Claimed | None:
        """Return what a claim says, or ``None`` if it was deleted or cannot be read."""
        try:
            return decode_claim(self._store.get(claim.key, most_bytes=MAX_RUN_BYTES))
        except (NotFound, OversizedDocument):
            return None

    def put_claim(self, claim: Claim, holder: Holder, pod: LeasedPod) -> None:
        """Write this pod's claim, with its present age. A late request does not write it again: its time has a meaning."""
        job = {"job": holder.job} if holder.job else {}
        fields = {"format": FORMAT, "holder": holder.name, "age_s": round(pod.age_s(), 1)}
        with suppress(AlreadyExists):  # by an earlier try, whose answer was lost
            self._store.put(claim.key, encode_json(fields | job), only_if_absent=True)

    def delete_claims(self, claims: list[Claim]) -> None:
        """Delete claims."""
        self._store.delete([claim.key for claim in claims])

    def arrive(self, holder: Holder, pod: LeasedPod) -> Arrival | None:
        """Write an object, to see this pod's start by the store's clock, and delete it; ``None``: the store tells no times."""
        key, age_s = keys.arrival(holder.id), pod.age_s()
        self._store.put(key, encode_json({"format": FORMAT, "holder": holder.name}))
        modified = next((stored.modified for stored in self._store.list(key) if stored.key == key), "")
        self._store.delete([key])
        now_s = seconds_of(modified)
        return None if now_s is None else Arrival(now_s - age_s, now_s)

    def ask(self, by: str) -> None:
        """Ask the holder for a sign of life. ``by``: who asks."""
        self._store.put(keys.ASKED, encode_json({"format": FORMAT, "by": by}))

    def is_asked(self) -> bool:
        """Whether another pod asks for a sign of life."""
        try:
            return bool(self._store.get(keys.ASKED, most_bytes=MAX_RUN_BYTES))
        except NotFound:
            return False
        except OversizedDocument:  # not written by this system; it is deleted like an answered request
            return True

    def answered(self) -> None:
        """Delete the request for a sign of life."""
        self._store.delete([keys.ASKED])
