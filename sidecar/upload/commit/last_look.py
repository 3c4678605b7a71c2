"""Last look at the end of the process: which of this node's parts have other nodes committed meanwhile."""

from __future__ import annotations

from sidecar.core.format.found_checkpoint import Finished
from sidecar.repository.documents import Documents, is_of


class LastLook(Documents):
    """Compares checkpoints that this node was about to send, or to send again, with the commits in the store."""

    async def is_committed(self, checkpoint: Finished) -> bool:
        """Whether a checkpoint's step has a whole commit that names this node's part of the same save.

        Reads documents and one listing, no data: an object that only its content could prove counts as damaged.

        Raises:
            StoreError: A request failed.
        """
        there = await self.stored_commit(checkpoint.name)
        if there is None or there.commit is None or there.commit.attempt != checkpoint.attempt:
            return False
        part = await self.part(there.commit, checkpoint.node)
        if part is None or not is_of(part, checkpoint):
            return False
        return await self.why_not_whole(there.commit, there.crc64nvme) is None
