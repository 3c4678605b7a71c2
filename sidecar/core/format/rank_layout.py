"""Files of a checkpoint that a single rank reads, so that other nodes need not download them (FORMAT.md, "Resume").

A file name is listed here only if its writer and its reader are known. All other files go to every node, and so do all files if
the job has another number of nodes or ranks than the one that saved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core.format.manifest import Manifest
from trainer_hook.contract import FINAL, META_OWN_SHARDS

_RANK = r"(0|[1-9][0-9]{0,8})"


@dataclass(frozen=True, slots=True)
class Share:
    """A node's share of the ranks: those of its training processes, and the world size."""

    world_size: int
    ranks: frozenset[int]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or max(self.ranks) >= self.world_size:
            raise ValueError(f"ranks {sorted(self.ranks)[:8]} must be some of 0 … {self.world_size - 1}")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Name pattern of files that belong to one rank each. The pattern's first group is the rank."""

    pattern: re.Pattern[str]
    every_rank_writes: bool = True
    """Every rank of the job writes such a file. Other ranks in the names mean something else, such as ranks of a group."""
    for_everybody: frozenset[int] = frozenset()
    """Ranks whose files all ranks read."""
    promise: str | None = None
    """Key in ``meta`` under which the writer confirms this layout; ``None``: no confirmation needed."""

    def private(self, paths: Iterable[str], *, world_size: int) -> dict[str, int]:
        """Return the rank of each matching path; empty if the ranks in the names are not those of the job."""
        found = {path: int(match[1]) for path in paths if (match := self.pattern.fullmatch(path))}
        ranks, known = set(found.values()), range(world_size)
        fits = len(ranks) == world_size if self.every_rank_writes else True
        if not fits or any(rank not in known for rank in ranks):
            return {}
        return {path: rank for path, rank in found.items() if rank not in self.for_everybody}


LAYOUTS = (
    RankLayout(re.compile(rf"rng_state_{_RANK}\.pth")),  # Hugging Face Trainer
    RankLayout(re.compile(rf"rank_{_RANK}\.pt")),  # trainer_hook's loops
    # DeepSpeed's names hold data-parallel ranks, which are the job's ranks if there is one per process.
    *(
        RankLayout(re.compile(rf"(?:global_step[0-9]+|deepspeed)/(?:bf16_)?zero_pp_rank_{_RANK}_mp_rank_00_{kind}_states\.pt"))
        for kind in ("optim", "model")
    ),
    # torch.distributed.checkpoint stores replicated tensors in any rank's file, unless it is configured to use the lowest.
    RankLayout(
        re.compile(rf"sharded/__{_RANK}_[0-9]+\.distcp"),
        every_rank_writes=False,
        for_everybody=frozenset({0}),
        promise=META_OWN_SHARDS,
    ),
)


def private_files(manifests: Sequence[Manifest]) -> Mapping[str, int]:
    """Return the files of a checkpoint that a single rank reads. ``manifests``: those of all its nodes.

    Returns:
        Rank by path, without paths that several nodes have: their readers are unknown.
    """
    first = manifests[0]
    if first.name == FINAL or first.world_size is None or any(m.world_size != first.world_size for m in manifests):
        return {}
    nodes = Counter(entry.path for manifest in manifests for entry in manifest.files)
    of_one_node = [path for path, count in nodes.items() if count == 1]
    private: dict[str, int] = {}
    for layout in LAYOUTS:
        if layout.promise is None or all(m.meta.get(layout.promise) is True for m in manifests):
            private |= layout.private(of_one_node, world_size=first.world_size)
    return private


def left_out(manifests: Sequence[Manifest], share: Share | None, *, nodes: int) -> frozenset[str]:
    """Return the paths that a node does not download.

    Args:
        manifests: Manifests of all nodes that saved.
        share: The node's ranks; ``None``: it downloads everything.
        nodes: Number of nodes of the resuming job. If nodes or ranks differ from the saving job's, nothing is left out.
    """
    if share is None or len(manifests) != nodes or manifests[0].world_size != share.world_size:
        return frozenset()
    return frozenset(path for path, rank in private_files(manifests).items() if rank not in share.ranks)
