"""Saves of a library that hold only a part of what a resume needs: a subclass may write nothing but an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from trainer_hook.contract import ContractError
from trainer_hook.process.log import warn
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.volume.checkpoint_folder import listed_files

ENOUGH = 2
"""Saves in a row that were only a part: the next one would be, too. A single one may be due to files that somebody deleted."""


class _Writer(Protocol):
    may_write_part: bool

    def lacking(self, files: Mapping[str, int]) -> list[str]: ...


class PartialSaves:
    """Examines the saves of one ``train()`` call. Every method is called on every rank at the same step."""

    def __init__(self, writer: _Writer, consensus: RankConsensus) -> None:
        self._writer = writer
        self._consensus = consensus
        self._found = 0

    @property
    def are_usual(self) -> bool:
        """Whether this trainer saves only parts. The same on every rank."""
        return self._found >= ENOUGH

    def is_whole(self, folder: Path, *, deferred: Iterable[str] = (), wrote: bool = True) -> bool:
        """Whether a run could resume from what the ranks have written, as far as rank 0 sees it. Collective.

        ``deferred``: paths of files that are still to be written. ``wrote``: this rank's part is written; if that of any rank
        is not, nothing is concluded; if a rank has died, what this rank sees counts.
        """
        if not self._writer.may_write_part:
            return True
        lacking = self._lacking(folder, deferred) if wrote and self._consensus.world.rank == 0 else []
        try:
            is_written = self._consensus.all_agree(wrote)  # a rank that fails deletes the folder
            is_seen = self._consensus.all_agree(lacking is not None)
            is_whole = self._consensus.all_agree(not lacking)
        except RuntimeError:  # of a rank that has died: the next step ends training, and a preempted process ends as such
            return lacking == []
        if not is_written or not is_seen or is_whole:
            self._found = 0
            return not is_written or (is_seen and is_whole)
        self._found += 1
        if lacking and self._found == 1:
            warn(
                f"{folder.name} is not published: the trainer's own code saves only a part of a checkpoint, without "
                f"{', '.join(lacking)}, and no run could resume from it"
            )
        elif lacking and self._found == ENOUGH:
            warn(f"{folder.name} is only a part, too: nothing more is saved in this train() call; a preempted run begins anew")
        return False

    def _lacking(self, folder: Path, deferred: Iterable[str]) -> list[str] | None:
        """Return what the save lacks; ``None``: its files cannot be seen now."""
        try:
            written = {file.path: file.size_bytes for file in listed_files(folder)}
        except FileNotFoundError:
            written = {}
        except (OSError, ContractError) as error:
            warn(f"{folder.name} is not published: its files cannot be listed ({error})")
            return None
        return self._writer.lacking(written | dict.fromkeys(deferred, 0))
