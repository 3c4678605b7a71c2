"""What a node knows of steps beside what the store shows: retention leaves alone what is in use, or may be being sent."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.catalog.catalog import Catalog
from sidecar.core.lifecycle.states import WANTED
from sidecar.download.quarantine import Quarantine
from sidecar.download.resume_service import ResumeService


@dataclass
class KnownSteps:
    """A person's command knows nothing (``None``), so that each step may be being sent or written anew."""

    catalog: Catalog | None = None
    """Each commit of the job passes through the catalog of each of its nodes, before it is replaced and afterwards."""
    resume_service: ResumeService | None = None
    quarantine: Quarantine | None = None
    is_idle: bool = False
    """Nobody writes below the prefix: a commit counts at first sight, because nothing has to settle."""

    def in_use(self) -> frozenset[str]:
        """Return the checkpoints that a run resumes from: they must stay."""
        return frozenset() if self.resume_service is None else self.resume_service.in_use()

    def may_be_rewritten(self, name: str) -> bool:
        """Whether a checkpoint may be written anew at the moment: its commit is read at each run."""
        return self.catalog is None or self.catalog.get(name) is not None

    def is_pending(self, name: str) -> bool:
        """Whether this node may be sending a checkpoint: the deletion of an earlier writing of it is not finished then."""
        known = None if self.catalog is None else self.catalog.get(name)
        return self.catalog is None or (known is not None and known.state in WANTED)

    def is_quarantined(self, name: str, crc: str) -> bool:
        """Whether this node has quarantined the commit of a name with a checksum."""
        return self.quarantine is not None and self.quarantine.holds(name, crc)
