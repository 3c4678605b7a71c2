"""``verify``, ``rm``, ``prune``, ``bad``: the checkpoints of a store, checked and cleared by a person."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import progress
from sidecar.cli.options import (
    CheckpointAddress,
    CheckpointOrNewest,
    Json,
    StoreAddress,
    WhileLive,
    Yes,
    address_to_read,
    checkpoint_address,
    store_address,
)
from sidecar.cli.output import PROGRAM, print_answer, say
from sidecar.cli.render import counted
from sidecar.cli.render_store import bad_text, plan_text, verification_text
from sidecar.core.format.readable import size_text
from sidecar.core.lifecycle.exit_codes import EXIT_DAMAGED
from sidecar.errors import ConfigurationError, RequestRefused
from trainer_hook.contract.plain_text import plain_text

if TYPE_CHECKING:
    from sidecar.lifecycle.idle_prefix import IdlePrefix
    from sidecar.standalone.session import StoreSession


def verify(
    checkpoint: CheckpointOrNewest,
    quick: Annotated[bool, typer.Option("--quick", help="documents and sizes only; read no file")] = False,
    every: Annotated[bool, typer.Option("--all", help="all committed checkpoints of the prefix")] = False,
    as_json: Json = False,
) -> int:
    """Compare every byte of a checkpoint in a store.

    Changes nothing. Exit code 8: it is damaged.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.checking import verified

    address = address_to_read(checkpoint)
    if every and address.checkpoint is not None:
        raise ConfigurationError("--all is for a prefix, without the name of a checkpoint")
    found = run_in_store(
        "verify",
        address.store,
        lambda session, on_progress: verified(session, address.checkpoint, every=every, quick=quick, on_bytes=on_progress),
    )
    answer = {"store": address.store, "quick": quick, "checkpoints": [examined.verdict() for examined in found]}
    print_answer(answer, verification_text, as_json=as_json)
    return EXIT_DAMAGED if any(examined.problems for examined in found) else 0


def rm(checkpoint: CheckpointAddress, yes: Yes = False, while_live: WhileLive = False, as_json: Json = False) -> int:
    """Delete a checkpoint in a store.

    Its commit goes first, so that no half of it reads as whole.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.removal import remove

    store, name = checkpoint_address(checkpoint)

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> Any:
        from sidecar.repository.verification import Verifier

        found = await Verifier(session.store, session.executor).examine(name)
        said = f"{session.store.url}/{name} ({found.state.value}, {size_text(found.size_bytes)})"
        _confirm("rm", f"delete {said}?", yes=yes)
        return await remove(session, name, lease=await _lease("rm", session, while_live=while_live))

    removed = run_in_store("rm", store, work)
    return print_answer(
        {"store": store, **asdict(removed)},
        lambda a: f"deleted {plain_text(a['name'])}: {counted(a['objects'], 'file')}, {size_text(a['size_bytes'])}",
        as_json=as_json,
    )


def prune(
    store: StoreAddress,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, help="newest whole checkpoints that stay")],
    every: Annotated[
        int | None, typer.Option("--every", metavar="STEPS", min=1, help="multiples of this step stay, too")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, with its reasons, and change nothing")] = False,
    yes: Yes = False,
    while_live: WhileLive = False,
    as_json: Json = False,
) -> int:
    """Delete the old checkpoints of a store.

    By the rule of CKPT_KEEP_STORE and CKPT_KEEP_EVERY_STEPS.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.removal import Pruner, Pruning

    address = store_address(store)
    if address.checkpoint is not None:
        raise ConfigurationError(f"{store} is one checkpoint: prune takes the prefix of a run")

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> Pruning:
        lease = None if dry_run else await _lease("prune", session, while_live=while_live)
        pruner = Pruner(session, keep_newest=keep, keep_every_steps=every, lease=lease, is_idle=dry_run or lease is not None)
        found, pruning = await pruner.plan(lambda doing: on_progress(doing, 0, 0))
        if dry_run or not pruning.planned:
            return pruning
        on_progress("", 0, 0)
        _confirm("prune", f"delete {counted(len(pruning.planned), 'checkpoint')} of {session.store.url}?", yes=yes)
        return await pruner.carry_out(found, pruning)

    pruning = run_in_store("prune", address.store, work, counts=True)
    return print_answer({"store": address.store, **pruning.fields(is_dry=dry_run)}, plan_text, as_json=as_json)


bad = typer.Typer(rich_markup_mode=None, help="List or release checkpoints that failed verification.")


@bad.command("ls")
def bad_ls(store: StoreAddress, as_json: Json = False) -> int:
    """List the bad checkpoints of a store, with the reasons."""
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.quarantines import quarantines

    address = store_address(store)
    found = run_in_store("bad ls", address.store, lambda session, _: quarantines(session, checkpoint=address.checkpoint))
    answer = {"store": address.store, "bad": [asdict(record) for record in found]}
    return print_answer(answer, bad_text, as_json=as_json)


@bad.command("release")
def bad_release(checkpoint: CheckpointAddress, as_json: Json = False) -> int:
    """Let the next resume try a bad checkpoint again; it verifies every byte."""
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.quarantines import release

    store, name = checkpoint_address(checkpoint)
    found = run_in_store("bad release", store, lambda session, _: release(session, name))
    answer = {"store": store, "released": [asdict(record) for record in found]}
    return print_answer(answer, lambda _: f"released {name}: the next resume tries it again", as_json=as_json)


async def _lease(command: str, session: StoreSession, *, while_live: bool) -> IdlePrefix | None:
    """Make sure that no run uses the prefix. Returns what checks that; ``None``: the person said that one may."""
    from sidecar.lifecycle.idle_prefix import IdlePrefix

    if while_live:
        return None
    idle = IdlePrefix(session.store, session.executor)
    await idle.begin(ask_holder(command))
    return idle


def ask_holder(command: str) -> Callable[[str, float], None]:
    """Return a function that says that the holder of the prefix is asked for a sign of life."""

    def on_wait(holder: str, seconds: float) -> None:
        say(f"asking pod {holder}, which held the prefix, for a sign of life ({seconds:.0f} s)", command)

    return on_wait


def _confirm(command: str, question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestRefused("standard input is no terminal, so nobody can be asked: add --yes")
    print(f"{PROGRAM} {command}: {plain_text(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RequestRefused("not confirmed: nothing was deleted")
