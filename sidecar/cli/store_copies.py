"""``pull`` and ``push``: copies of checkpoints between a store and a folder, by a person."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import progress
from sidecar.cli.options import CheckpointOrNewest, Json, StoreAddress, address_to_read, store_address
from sidecar.cli.output import fail, print_answer, print_path
from sidecar.cli.render import counted
from sidecar.cli.store_care import ask_holder
from sidecar.core.format.checkpoint_address import Address, misnamed
from sidecar.core.format.readable import size_text
from sidecar.core.lifecycle.exit_codes import EXIT_DAMAGED, EXIT_FAILED, EXIT_GIVEN_UP, EXIT_NOTHING, EXIT_REFUSED
from sidecar.errors import ConfigurationError, NothingFound, RequestRefused
from trainer_hook.contract.plain_text import plain_text

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
    or_older: Annotated[
        bool, typer.Option("--or-older", help="an older checkpoint in place of a damaged newest one is a success")
    ] = False,
    as_json: Json = False,
) -> int:
    """Download a checkpoint of a store and verify every byte.

    Its path is all that is on standard output. After an interruption the same command continues. Exit code 8: the checkpoint is
    damaged; of a prefix, an older one was pulled.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.repository.verification import Verifier
    from sidecar.standalone.pulling import Puller, Wanted

    address = address_to_read(checkpoint)
    wanted = Wanted(address.checkpoint, frozenset(rank or ()), node)

    async def work(session: StoreSession, on_progress: progress.OnProgress) -> Pulled:
        pulled = await Puller(session, folder.absolute()).pull(wanted, on_progress)
        if address.checkpoint is not None and _exit_code(pulled, address) == EXIT_NOTHING:
            await Verifier(session.store, session.executor).examine(address.checkpoint)  # raises if there is none of that name
        return pulled

    pulled = run_in_store("pull", address.store, work)
    answer = {"store": address.store, **asdict(pulled)}
    newer = _newer_not_usable(pulled)
    code = EXIT_DAMAGED if newer and not or_older else _exit_code(pulled, address)
    said = _why_not(pulled, checkpoint) if code else None
    if newer and pulled.checkpoint is not None:
        said = _older_was_pulled(pulled.checkpoint, newer, or_older=or_older)
    return print_path(answer, "pull", said=said, code=code, as_json=as_json)


def _newer_not_usable(pulled: Pulled) -> list[str]:
    """Return the committed checkpoints that were passed over for the one that was pulled."""
    if pulled.state.value != "ready":
        return []
    return [passed.checkpoint for passed in pulled.passed_over if not passed.reason.startswith("not committed")]


def _older_was_pulled(checkpoint: str, newer: list[str], *, or_older: bool) -> str:
    text = f"pulled {checkpoint}, which is older than {', '.join(newer)}: that cannot be used"
    return text if or_older else f"{text}; with --or-older this is a success"


def _exit_code(pulled: Pulled, address: Address) -> int:
    if pulled.state.value == "none":
        is_damaged = address.checkpoint is not None and not any("not committed" in p.reason for p in pulled.passed_over)
        return EXIT_DAMAGED if is_damaged and pulled.passed_over else EXIT_NOTHING
    return 0 if pulled.state.value == "ready" else EXIT_FAILED


def _why_not(pulled: Pulled, address: str) -> str:
    if pulled.state.value == "none":
        return "nothing was pulled" if pulled.passed_over else f"{address}: no checkpoint is committed{misnamed(address)}"
    return pulled.detail or "failed"


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint's directory, or one that holds several")],
    store: StoreAddress,
    replace: Annotated[bool, typer.Option("--replace", help="replace another checkpoint of the same name")] = False,
    as_json: Json = False,
) -> int:
    """Upload a checkpoint directory of any program to a store.

    It is verified and committed. After an interruption the same command continues. Of several, each is tried; exit code 7: the
    store has another checkpoint of a name.
    """
    from sidecar.cli.session import run_in_store
    from sidecar.standalone.directory import checkpoints_in

    address = store_address(store)
    found = {address.checkpoint: folder.absolute()} if address.checkpoint else checkpoints_in(folder)
    if not found:
        raise NothingFound(f"{folder}: its name is no checkpoint's, nor does it hold one: push it to {store}/checkpoint-<step>")
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such directory")
    outcome = _Outcome(address.store, is_one=len(found) == 1)
    try:
        run_in_store("push", address.store, partial(_push_all, found, outcome, replace=replace))
    except BaseException:
        if outcome.pushed and not as_json:  # what was done before; the error is told after it
            print_answer(outcome.answer(), _pushed_text, as_json=False)
        raise
    return outcome.tell(as_json=as_json)


async def _push_all(
    found: dict[str, Path], outcome: _Outcome, session: StoreSession, on_progress: progress.OnProgress, *, replace: bool
) -> None:
    from sidecar.lifecycle.idle_prefix import IdlePrefix
    from sidecar.standalone.directory import SourceDirectory
    from sidecar.standalone.pushing import Pusher

    sources, read = {name: SourceDirectory(path, name) for name, path in found.items()}, {}
    for name, source in sources.items():  # all, before anything is sent
        with outcome.refusals(outcome.passed_over, name):
            read[name] = await source.read(session.store.key_limits)
    capabilities = await session.probe()
    idle = IdlePrefix(session.store, session.executor)
    await idle.begin(ask_holder("push"))
    with state_folder(session.url) as state:
        pusher = Pusher(session, idle, capabilities, state=Path(state))
        for name, checkpoint in read.items():
            with outcome.refusals(outcome.refused, name):
                outcome.pushed.append(await pusher.push(sources[name], checkpoint, on_progress, replace=replace))


class _Outcome:
    """What became of each checkpoint of a push."""

    def __init__(self, store: str, *, is_one: bool) -> None:
        """``is_one``: the command pushes one checkpoint, so a refusal of it is the command's error."""
        self._store = store
        self._is_one = is_one
        self.pushed: list[Pushed] = []
        self.passed_over: list[dict[str, str]] = []
        """Directories that cannot be pushed."""
        self.refused: list[dict[str, str]] = []
        """Checkpoints that differ from those of the store, or that change while they are read."""

    @contextlib.contextmanager
    def refusals(self, kept: list[dict[str, str]], name: str) -> Iterator[None]:
        """Keep the reason of a refusal in a list, so that the other checkpoints follow."""
        try:
            yield
        except RequestRefused as error:
            if self._is_one:
                raise
            kept.append({"checkpoint": name, "reason": str(error)})

    def answer(self) -> dict[str, Any]:
        """Return the fields of the command's answer."""
        pushed = [asdict(each) for each in self.pushed]
        return {"store": self._store, "pushed": pushed, "passed_over": self.passed_over, "refused": self.refused}

    def tell(self, *, as_json: bool) -> int:
        """Print the answer. Returns the exit code."""
        if not self.refused:
            print_answer(self.answer(), _pushed_text, as_json=as_json)
            return 0 if all(each.state.value == "committed" for each in self.pushed) else EXIT_GIVEN_UP
        what = f"refused: {', '.join(each['checkpoint'] for each in self.refused)}"
        failure = {"error": f"push: {what}", "exit_code": EXIT_REFUSED}
        print_answer(self.answer() | failure, _pushed_text, as_json=as_json)
        return fail(f" push: {what}", EXIT_REFUSED)


def _pushed_text(answer: dict[str, Any]) -> str:
    lines = [f"passed over {p['checkpoint']}: {plain_text(p['reason'])}" for p in answer["passed_over"]]
    for each in answer["pushed"]:
        amount = f"{counted(each['files'], 'file')}, {size_text(each['size_bytes'])}"
        if each["state"] == "committed":
            lines.append(f"{each['checkpoint']}: {'committed' if each['is_new'] else 'already committed'}: {amount}")
        else:
            lines.append(f"{each['checkpoint']}: uploaded, not committed: {plain_text(each['detail'] or '')}")
    lines += [f"{each['checkpoint']}: refused: {plain_text(each['reason'])}" for each in answer["refused"]]
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
