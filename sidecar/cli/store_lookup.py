"""``ls`` and ``show`` of a store, without a sidecar."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sidecar.cli import progress
from sidecar.cli.output import print_answer
from sidecar.cli.render_store import checkpoint_fields, details_text, listing_text, run_fields, runs_text
from sidecar.cli.session import run_in_store
from sidecar.core.format.checkpoint_address import Address, misnamed
from sidecar.errors import NothingFound
from sidecar.repository.verification import Verifier
from sidecar.standalone.listing import Listing
from sidecar.standalone.session import StoreSession

FEW_COLLECTIONS = 200_000
"""Allocations between two collections during a listing; Python's default is 700. A quarter of the CPU time of a long one."""


def list_store(address: Address, *, newest: int | None, is_long: bool, as_json: bool) -> int:
    """Print the checkpoints of a run, or the runs below a prefix."""

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> dict[str, Any]:
        listing = Listing(session.store, session.executor)
        needs_names = address.checkpoint is None and newest is not None
        folders = await listing.folders() if needs_names else [address.checkpoint] if address.checkpoint else []
        found = await listing.checkpoints(
            folders,
            newest=1 if address.checkpoint else newest,
            with_commits=is_long,
            on_read=lambda done, total: on_progress("reading commits", done, total),
        )
        if not found and address.checkpoint is not None:
            raise NothingFound(f"{session.store.url}/{address.checkpoint}: no such checkpoint")
        if not found:
            folders = await listing.folders()
            if await listing.run("", folders) is None:
                return {"store": session.store.url, "runs": [run_fields(found) for found in await listing.runs(folders)]}
        return {"store": session.store.url, "checkpoints": [checkpoint_fields(each) for each in found]}

    with _few_collections():
        answer = run_in_store("ls", address.store, work, counts=True)
    if not answer.get("checkpoints") and not answer.get("runs"):
        raise NothingFound(f"{answer['store']}: no checkpoints, and no runs below it{misnamed(answer['store'])}")
    return print_answer(answer, runs_text if "runs" in answer else listing_text, as_json=as_json)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage seldom: the objects of a long listing stay, and each collection would look at all of them."""
    before = gc.get_threshold()
    gc.set_threshold(FEW_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def show_stored(address: Address, *, as_json: bool) -> int:
    """Print one checkpoint of a store, the newest committed one if the address names none."""

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> dict[str, Any]:
        verifier = Verifier(session.store, session.executor)
        name = address.checkpoint or await verifier.newest_committed()
        found = await verifier.examine(name)
        return {"store": session.store.url, **found.fields()}

    return print_answer(run_in_store("show", address.store, work), details_text, as_json=as_json)
