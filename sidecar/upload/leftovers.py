"""Uploads that an earlier life began and nobody continues: they cost money until somebody aborts them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from sidecar.core.leftovers import is_leftover
from sidecar.errors import StoreError
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from sidecar.upload.journal import Journal

log = structlog.get_logger()


async def abort_leftovers(
    store: Store, transfers: Transfers, journals: Path, *, alone: bool, newest_committed_step: int | None
) -> None:
    """Abort what no journal continues. Before any upload is begun.

    Args:
        store: Where they are.
        transfers: Sends the requests.
        journals: The folder of the journals.
        alone: The job has one node: all uploads below the prefix are ours.
        newest_committed_step: Those of older steps are not continued by others either.
    """
    known = await asyncio.to_thread(_continued, journals)
    try:
        pending = await transfers.once(lambda: list(store.pending_uploads("")))
        for upload in pending:
            if is_leftover(
                upload.key,
                upload.upload_id,
                age_s=time.time() - upload.begun_at_s,
                known=known,
                alone=alone,
                newest_committed_step=newest_committed_step,
            ):
                log.info("leftover_upload_aborted", key=upload.key)
                await transfers.once(store.abort_upload, upload.key, upload.upload_id)
    except StoreError as error:  # they cost money, not data
        log.warning("leftover_uploads_not_aborted", error=str(error), hint="grant s3:ListBucketMultipartUploads")


def _continued(journals: Path) -> set[str]:
    return {upload.upload_id for path in journals.glob("*.jsonl") for upload in Journal(path).uploads.values()}
