"""``ls``, ``show``, ``resume``: the checkpoints of the volume and the store, of the running sidecar or of a store alone."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from sidecar.cli import direct, progress
from sidecar.cli.client import Client
from sidecar.cli.options import Json, TimeoutS, address_to_read, store_address
from sidecar.cli.output import print_answer, print_path
from sidecar.cli.render import checkpoint_text
from sidecar.core.format.checkpoint_address import is_address, named_checkpoint
from sidecar.core.lifecycle.exit_codes import EXIT_FAILED, EXIT_NOTHING
from sidecar.errors import ConfigurationError, NothingFound
from trainer_hook.contract import is_checkpoint_name

RESUME_POLL_S = 1.0


def ls(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="s3://bucket/prefix or file:///path: without a sidecar")
    ] = None,
    where: Annotated[Literal["local", "store"] | None, typer.Option("--where", help="only those of one place")] = None,
    newest: Annotated[int | None, typer.Option("--newest", metavar="N", min=1, help="only the newest of a store")] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="also read the commits of a store")] = False,
    as_json: Json = False,
) -> int:
    """List the checkpoints of the running sidecar, or of a store.

    Of a store's folder above runs, the runs are listed.
    """
    if store is None:
        if newest is not None or long:
            raise ConfigurationError("--newest and --long are for a store: checkpoint-sidecar ls s3://bucket/prefix")
        return direct.list_checkpoints(where=where, as_json=as_json)
    if where is not None:
        raise ConfigurationError("--where is for the running sidecar: leave out the store")
    address = store_address(store)  # before the modules of stores are loaded
    from sidecar.cli.store_lookup import list_store

    return list_store(address, newest=newest, is_long=long, as_json=as_json)


def show(
    checkpoint: Annotated[str, typer.Argument(help="such as checkpoint-20, 20, or s3://bucket/prefix/checkpoint-20")],
    as_json: Json = False,
) -> int:
    """Show one checkpoint, of the running sidecar or of a store."""
    if is_address(checkpoint):
        address = address_to_read(checkpoint)
        from sidecar.cli.store_lookup import show_stored

        return show_stored(address, as_json=as_json)
    answer = Client(timeout_s=60).get(f"/v1/checkpoints/{_name(checkpoint)}")
    return print_answer(answer, checkpoint_text, as_json=as_json)


def resume(
    checkpoint: Annotated[str, typer.Argument(help="such as checkpoint-20, or 20")] = "latest",
    timeout_s: TimeoutS = 600.0,
    as_json: Json = False,
) -> int:
    """Bring a checkpoint back to the volume and print its path.

    The path is all that is on standard output. Exit code 5: there is no committed checkpoint.
    """
    client = Client(timeout_s=70)
    wanted = checkpoint if checkpoint == "latest" else _name(checkpoint)
    answer = client.post("/v1/resume", {"checkpoint": wanted, "asked_by": "person"})
    until_s = time.monotonic() + timeout_s
    with progress.shown("resume") as on_progress:
        while answer["state"] in ("choosing", "downloading") and (left_s := until_s - time.monotonic()) > 0:
            on_progress(answer["checkpoint"] or answer["state"], answer["done_bytes"], answer["total_bytes"])
            answer = client.get(f"/v1/resume/{answer['id']}?wait_s={min(RESUME_POLL_S, left_s):.3f}")
    code = {"ready": 0, "none": EXIT_NOTHING}.get(answer["state"], EXIT_FAILED)
    why_not = "nothing to resume from" if code == EXIT_NOTHING else f"{answer['state']}: {answer['detail']}"
    return print_path(answer, "resume", said=why_not if code else None, code=code, as_json=as_json)


def _name(text: str) -> str:
    """Return the name of a checkpoint that a person gave as its name, or as its step alone.

    Raises:
        NothingFound: It is no such name.
    """
    name = named_checkpoint(text)
    if not is_checkpoint_name(name):
        raise NothingFound(f"{text[:80]!r} is no checkpoint's name: checkpoint-<step> or final")
    return name
