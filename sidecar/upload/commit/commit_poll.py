"""State of one node that waits for the commit of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.core.commit.commit import Decision, Wait
from sidecar.core.commit.commit_roster import CommitTurn
from sidecar.upload.commit.manifest_collector import ManifestCollector


@dataclass(slots=True)
class CommitPoll:
    """Observations of a node that has published its part and waits for the commit. Times are of the committer's clock."""

    collector: ManifestCollector
    turn: CommitTurn
    polled_s: float
    listed_s: float
    ready_since_s: dict[str, float] = field(default_factory=dict)
    """Since when a stage of the commit could be done, by stage: nodes of a lower position act first."""
    bundled: dict[str, str] = field(default_factory=dict)
    """Etags of the manifests of the bundle that this node wrote."""
    reads_reuploads: bool = False
    """Whether this poll also reads the reupload requests."""
    last: Decision = Wait("its manifest was published")  # noqa: RUF009 - frozen

    def is_our_turn(self, stage: str, position: int, now_s: float) -> bool:
        """Whether the nodes of lower positions had their time for a stage."""
        return now_s - self.ready_since_s.setdefault(stage, now_s) >= self.turn.patience_s(position)
