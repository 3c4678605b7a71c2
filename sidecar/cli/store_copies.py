"""``pull`` and ``push``: copies of checkpoints between a store and a folder, by a person."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import progress
from sidecar.cli.options import CheckpointOrNewest, Json, StoreAddress, address_to_read, store_address
from sidecar.cli.output import print_answer, print_path
from sidecar.cli.render import counted, size_text
from sidecar.cli.store_care import ask_holder
from sidecar.core.format.checkpoint_address import Address, misnamed
from sidecar.core.format.plain_text import plain_text
from sidecar.core.lifecycle.exit_codes import EXIT_DAMAGED, EXIT_FAILED, EXIT_GIVEN_UP, EXIT_NOTHING
from sidecar.errors import ConfigurationError, NothingFound, RequestRefused

if TYPE_CHECKING:
    from sidecar.standalone.pulling import Pulled
    from sidecar.standalone.pushing import Pushed
    from sidecar.standalone.session import StoreSession


def pull(
    checkpoint: CheckpointOrNewest,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="gets a folder of the checkpoint's name")],
    rank: Annotated[list[int] | None, typer.Option("--rank", metavar="N", min=0, help="only what this rank reads")] = None,
    node: Annotated[
        int | None, typer.Option("--node", metavar="N", min=0, help="of files with one path on several nodes, this node's")
    ] = None,
    as_json: Json = False,
) -> int:
    """Download a checkpoint of a store and verify every byte.

    Its path is all that is on standard output. After an interruption the same command continues.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.pulling import Puller, Wanted

    address = address_to_read(checkpoint)
    wanted = Wanted(address.checkpoint, frozenset(rank or ()), node)

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> Pulled:
        return await Puller(session, folder.absolute()).pull(wanted, on_progress)

    pulled = run_in_store("pull", address.store, work)
    answer = {"store": address.store, **asdict(pulled)}
    return print_path(answer, "pull", why_not=_why_not(pulled, checkpoint), code=_exit_code(pulled, address), as_json=as_json)


def _exit_code(pulled: Pulled, address: Address) -> int:
    if pulled.state.value == "none":
        is_damaged = address.checkpoint is not None and not any("not committed" in p.reason for p in pulled.passed_over)
        return EXIT_DAMAGED if is_damaged and pulled.passed_over else EXIT_NOTHING
    return 0 if pulled.state.value == "ready" else EXIT_FAILED


def _why_not(pulled: Pulled, address: str) -> str:
    if pulled.state.value == "none":
        return "nothing to resume from" if pulled.passed_over else f"{address}: no checkpoint is committed{misnamed(address)}"
    return pulled.detail or "failed"


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint's directory, or one that holds several")],
    store: StoreAddress,
    replace: Annotated[bool, typer.Option("--replace", help="replace another checkpoint of the same name")] = False,
    as_json: Json = False,
) -> int:
    """Upload a checkpoint directory of any program to a store.

    It is verified and committed. After an interruption the same command continues.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.lifecycle.idle_prefix import IdlePrefix
    from sidecar.standalone.directory import SourceDirectory, checkpoints_in
    from sidecar.standalone.pushing import Pusher

    address = store_address(store)
    found = {address.checkpoint: folder.absolute()} if address.checkpoint else checkpoints_in(folder)
    if not found:
        raise NothingFound(f"{folder}: its name is no checkpoint's, nor does it hold one: push it to {store}/checkpoint-<step>")
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such directory")

    passed_over: list[dict[str, str]] = []

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> list[Pushed]:
        sources, read = {name: SourceDirectory(path, name) for name, path in found.items()}, {}
        for name, source in sources.items():  # all, before anything is sent
            try:
                read[name] = await source.read(session.store.key_limits)
            except RequestRefused as error:
                if len(found) == 1:
                    raise
                passed_over.append({"checkpoint": name, "reason": str(error)})
        capabilities = await session.probe()
        idle = IdlePrefix(session.store, session.executor)
        await idle.begin(ask_holder("push"))
        with state_folder(address.store) as state:
            pusher = Pusher(session, idle, capabilities, state=Path(state))
            return [await pusher.push(sources[name], read[name], on_progress, replace=replace) for name in read]

    pushed = run_in_store("push", address.store, work)
    answer = {"store": address.store, "pushed": [asdict(each) for each in pushed], "passed_over": passed_over}
    print_answer(answer, _pushed_text, as_json=as_json)
    return 0 if all(each.state.value == "committed" for each in pushed) else EXIT_GIVEN_UP


def _pushed_text(answer: dict[str, Any]) -> str:
    lines = [f"passed over {p['checkpoint']}: {plain_text(p['reason'])}" for p in answer["passed_over"]]
    for each in answer["pushed"]:
        amount = f"{counted(each['files'], 'file')}, {size_text(each['size_bytes'])}"
        if each["state"] == "committed":
            lines.append(f"{each['checkpoint']}: {'committed' if each['is_new'] else 'already committed'}: {amount}")
        else:
            lines.append(f"{each['checkpoint']}: uploaded, not committed: {plain_text(each['detail'] or '')}")
    return "\n".join(lines)


def state_folder(store: str) -> AbstractContextManager[str | Path]:
    """Return a context with the folder of a store's journals: lasting, if one can be made."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = base / "checkpoint-sidecar" / hashlib.blake2b(store.encode(), digest_size=8).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return tempfile.TemporaryDirectory()
    return contextlib.nullcontext(folder)
