"""Which files of a checkpoint one rank alone reads, so that the other nodes need not fetch them (FORMAT.md, "Resume").

Only names are known here whose writer and reader are known. Everything else is for everybody, and so is everything as soon as
the job is another one than the one that saved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core.manifest import Manifest
from trainer_hook.contract import FINAL, META_OWN_SHARDS

_RANK = r"(0|[1-9][0-9]{0,8})"


@dataclass(frozen=True, slots=True)
class Share:
    """What a node asks for: the ranks of its training processes, and of how many."""

    world_size: int
    ranks: frozenset[int]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or max(self.ranks) >= self.world_size:
            raise ValueError(f"ranks {sorted(self.ranks)[:8]} must be some of 0 … {self.world_size - 1}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Files that belong to one rank each. The first group of the pattern is the rank."""

    pattern: re.Pattern[str]
    every_rank_writes: bool = True
    """Names of other ranks than each of the job's mean something else, such as ranks of a smaller group."""
    for_everybody: frozenset[int] = frozenset()
    """Ranks whose files all the others read, too."""
    promise: str | None = None
    """Key in ``meta`` under which the writer says that it is so."""

    def private(self, paths: Iterable[str], *, world_size: int) -> dict[str, int]:
        """Return whose each path is; none at all where the ranks that are named are not those of the job."""
        found = {path: int(match[1]) for path in paths if (match := self.pattern.fullmatch(path))}
        ranks, known = set(found.values()), range(world_size)
        fits = len(ranks) == world_size if self.every_rank_writes else True
        if not fits or any(rank not in known for rank in ranks):
            return {}
        return {path: rank for path, rank in found.items() if rank not in self.for_everybody}


LAYOUTS = (
    Layout(re.compile(rf"rng_state_{_RANK}\.pth")),  # Hugging Face Trainer
    Layout(re.compile(rf"rank_{_RANK}\.pt")),  # trainer_hook's loops
    # DeepSpeed names data-parallel ranks: they are the job's where there is one for each process.
    *(
        Layout(re.compile(rf"(?:global_step[0-9]+|deepspeed)/(?:bf16_)?zero_pp_rank_{_RANK}_mp_rank_00_{kind}_states\.pt"))
        for kind in ("optim", "model")
    ),
    # torch.distributed.checkpoint puts what is replicated into any rank's file, unless it is told to take the lowest.
    Layout(
        re.compile(rf"sharded/__{_RANK}_[0-9]+\.distcp"),
        every_rank_writes=False,
        for_everybody=frozenset({0}),
        promise=META_OWN_SHARDS,
    ),
)


def private_files(manifests: Sequence[Manifest], *, layouts: Iterable[Layout] = LAYOUTS) -> Mapping[str, int]:
    """Return the files of a checkpoint that one rank alone reads, and which.

    Args:
        manifests: Of all its nodes.
        layouts: What is known.

    Returns:
        Rank by path. Never one that several nodes have: who then reads which is not known.
    """
    first = manifests[0]
    if first.name == FINAL or first.world_size is None or any(m.world_size != first.world_size for m in manifests):
        return {}
    nodes = Counter(entry.path for manifest in manifests for entry in manifest.files)
    of_one_node = [path for path, count in nodes.items() if count == 1]
    private: dict[str, int] = {}
    for layout in layouts:
        if layout.promise is None or all(m.meta.get(layout.promise) is True for m in manifests):
            private |= layout.private(of_one_node, world_size=first.world_size)
    return private


def left_out(manifests: Sequence[Manifest], share: Share | None, *, nodes: int) -> frozenset[str]:
    """Return the paths that a node does without.

    Args:
        manifests: Of all nodes that saved.
        share: What the node asks for; ``None``: everything.
        nodes: Of the job that resumes. Of another number of nodes or ranks each gets everything.
    """
    if share is None or len(manifests) != nodes or manifests[0].world_size != share.world_size:
        return frozenset()
    return frozenset(path for path, rank in private_files(manifests).items() if rank not in share.ranks)
