"""The right to write below a prefix, as uploads, commits and deletions ask for it."""

from __future__ import annotations

from typing import Protocol

from trainer_hook.contract import Node


class Lease(Protocol):
    """The right to write: a run's (``PrefixLease``), a person's command's (``IdlePrefix``), or unlimited (``NoLease``).

    A checkpoint asks three questions, each later and stricter than the one before: ``reason_not_to_upload`` before its files
    are sent, ``require_not_fenced`` while they are sent, and ``reason_not_to_commit`` before its commit.
    """

    async def reason_not_to_upload(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return why the files of a checkpoint must not be sent yet, or ``None``: they may. Asked before the first of them.

        Args:
            node: Node of the checkpoint; ``None``: this pod's.
            attempt: Attempt of the checkpoint.
            until_declared: Whether a node above 0 waits as before a commit, which the checkpoint would replace.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: The store cannot be asked now.
        """
        ...

    async def require_not_fenced(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return if no later writer has taken the prefix over. Asked every few seconds of sending, and before each deletion.

        Args:
            node: Node of the checkpoint; ``None``: this pod's.
            attempt: Attempt of the checkpoint; ``None``: it is not about one.

        Raises:
            Fenced: One has.
            StoreError: It is not known now.
        """
        ...

    async def reason_not_to_commit(self, node: Node, attempt: str) -> str | None:
        """Return why a commit must not be written or replaced yet, or ``None``: it may now. Asked just before.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
        """
        ...

    def epoch_of(self, attempt: str) -> int | None:
        """Return the epoch of the prefix under which this pod's trainer writes an attempt; ``None``: unknown."""
        ...

    def is_later(self, attempt: str, than: str) -> bool | None:
        """Whether an attempt is later than another one, whatever the clocks say; ``None``: unknown."""
        ...


class NoLease:
    """The right to write where there is no other pod."""

    async def reason_not_to_upload(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return ``None``: nobody is waited for. Raises as ``require_not_fenced``."""
        await self.require_not_fenced(node, attempt)
        return None

    async def require_not_fenced(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return at once."""

    async def reason_not_to_commit(self, node: Node, attempt: str) -> str | None:
        """Return ``None``, as ``reason_not_to_upload``."""
        await self.require_not_fenced(node, attempt)
        return None

    def epoch_of(self, attempt: str) -> int | None:
        """Return ``None``: it was written under no epoch of this prefix."""
        return None

    def is_later(self, attempt: str, than: str) -> bool | None:
        """Return ``None``: nobody declares attempts."""
        return None
