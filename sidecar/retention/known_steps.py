"""Steps that retention must leave alone: those that the run resumes from, and those that this node may be sending."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.catalog.catalog import Catalog
from sidecar.core.lifecycle.states import WANTED
from sidecar.download.quarantine import Quarantine
from sidecar.download.resume_service import ResumeService


@dataclass
class KnownSteps:
    """Knowledge of one node about steps, beyond the content of the store.

    ``None``: a person's command, which has no such knowledge. It has to assume that any step is being sent or written anew.
    """

    catalog: Catalog | None = None
    """Has every step that the job writes, because each node writes its part: the commits of other steps do not change."""
    resume_service: ResumeService | None = None
    quarantine: Quarantine | None = None
    is_idle: bool = False
    """No pod writes below the prefix: a commit counts at first sight, because no late request can damage it."""

    def in_use(self) -> frozenset[str]:
        """Return the checkpoints that a run resumes from: they must stay."""
        return frozenset() if self.resume_service is None else self.resume_service.in_use()

    def may_be_rewritten(self, name: str) -> bool:
        """Whether a checkpoint may be written anew now, so that its commit has to be read at each run."""
        return self.catalog is None or self.catalog.get(name) is not None

    def is_pending(self, name: str) -> bool:
        """Whether this node may be sending a checkpoint. The interrupted deletion of an earlier save of it must then wait."""
        known = None if self.catalog is None else self.catalog.get(name)
        return self.catalog is None or (known is not None and known.state in WANTED)

    def is_quarantined(self, name: str, crc: str) -> bool:
        """Whether this node has quarantined the commit of a name with a checksum."""
        return self.quarantine is not None and self.quarantine.holds(name, crc)
