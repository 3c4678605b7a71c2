"""Checkpoints that a script writes with a library's own call: those on the volume are published with a marker.

Nothing here communicates between ranks, because a script may save on some of them, or in a thread. The library's call does:
all ranks that take part make it together, and it returns when each has written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook import contract
from trainer_hook.process.log import info, set_rank, warn
from trainer_hook.process.rank_consensus import World, new_attempt, place_by_launcher
from trainer_hook.process.session import Session, known_session, session_of_saves
from trainer_hook.volume.checkpoint_folder import finish, listed_files
from trainer_hook.volume.rank_records import RankRecords

SETTLE_S = 1.0
"""A script may add files to the library's: the marker is written when no file has changed for this long."""
RECHECK_S = 5.0
"""Interval at which the newest checkpoint is checked for files that were added after its marker, which need a new one."""
EXIT_TIMEOUT_S = 10.0
"""Longest wait of an exiting rank until the other ranks of its node have returned from the same save."""


@dataclass(frozen=True, slots=True)
class SaveCall:
    """A library's call that saves a whole checkpoint."""

    folder: Any
    """A path; another type stands for storage other than files."""
    ranks: Callable[[], tuple[int, ...]]
    """Returns the ranks that make this call."""
    objection: str = ""
    """Why the end of the save cannot be known; empty: it can."""


_is_delegated: ContextVar[bool] = ContextVar("is_delegated", default=False)


@contextlib.contextmanager
def published_elsewhere(_: Callable[[], SaveCall]) -> Iterator[None]:
    """Surround a save on behalf of another process, which publishes it."""
    token = _is_delegated.set(True)
    try:
        yield
    finally:
        _is_delegated.reset(token)


@contextlib.contextmanager
def published(call: Callable[[], SaveCall]) -> Iterator[None]:
    """Surround a save: publish it if it is a checkpoint on the volume and the script, not this package, makes it.

    On every rank that takes part, also in a thread. An error here is logged and does not reach the script.
    """
    save = None if _is_delegated.get() else _quietly(functools.partial(_begin, call))
    yield
    if save is not None:
        _quietly(save.written)


def _quietly(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        text = f"the script's save is not published: {type(error).__name__}: {error}"
        if text not in _refused:
            _refused.add(text)
            warn(text)
        return None


def _refuse(parts: tuple[str, ...], why: str, *, kind: str) -> None:
    """Log that a save is not published: once for each kind of reason."""
    if kind not in _refused:
        _refused.add(kind)
        info(f"{'/'.join(parts) or 'a save into $CKPT_DIR itself'} is not published: {why}")


_refused: set[str] = set()


@contextlib.contextmanager
def expected(call: Callable[[], SaveCall]) -> Iterator[None]:
    """Surround a call after which another thread saves: open the session now, which records how this process ends."""
    if not _is_delegated.get():
        with _lock:
            _quietly(functools.partial(_accepted, call))
    yield


def _begin(call: Callable[[], SaveCall]) -> _ScriptSave | None:
    with _lock:
        save = _accepted(call)
        if save is not None:
            save.begin()
        return save


def _accepted(describe: Callable[[], SaveCall]) -> _ScriptSave | None:
    """Open the session and return the save that is to be published; ``None``: this one is not."""
    call = describe()
    parts = _inside_volume(call.folder)
    if parts is None or parts[:1] == (contract.SYSTEM_DIR,) or _is_ours(parts):
        return None
    if len(parts) != 1 or contract.step_of(parts[0]) is None:
        if hint := hint_for(parts):
            _refuse(parts, hint, kind="name" if len(parts) < 2 else "part")
        return None
    if call.objection:
        _refuse(parts, call.objection, kind="objection")
        return None
    session, ranks = session_of_saves(), call.ranks()
    if session is None:
        return None
    world = _world_of(session, ranks)
    if world is None or (world.nodes > 1 and len(ranks) < world.size):
        why = "only some ranks save it, or their nodes are unknown (LOCAL_RANK, LOCAL_WORLD_SIZE)"
        _refuse(parts, why, kind="ranks")
        return None
    session.take_part(world, session.attempt or _common_attempt(world))
    return _ScriptSave(session, world, ranks, parts[0])


def _inside_volume(folder: Any) -> tuple[str, ...] | None:
    """Return the parts of a path below the volume; ``None``: it is elsewhere."""
    volume = os.environ.get("CKPT_DIR", "").strip() or contract.DEFAULT_DIR
    if not isinstance(folder, str | os.PathLike) or not os.path.isdir(volume):  # noqa: PTH112
        return None
    real = Path(os.path.realpath(folder))
    return real.relative_to(os.path.realpath(volume)).parts if real.is_relative_to(os.path.realpath(volume)) else None


def _is_ours(parts: tuple[str, ...]) -> bool:
    """Whether this package makes the save, and publishes it itself."""
    session = known_session()
    return session is not None and (session.stop.is_training or parts[:1] in {(name,) for name in session.saved})


def hint_for(parts: tuple[str, ...]) -> str | None:
    """Return how the script can make its save at this path a checkpoint; ``None``: it is hardly meant to be one."""
    if not parts:
        return "checkpoints are directories in there, named checkpoint-<step>"
    if len(parts) == 1:
        return "the directory of a checkpoint must be named checkpoint-<step>"
    if contract.step_of(parts[0]) is not None:
        return f"only the script knows when all of {parts[0]} is there: let it write an empty {parts[0]}/{contract.MARKER} then"
    if parts[-1][-1:].isdecimal():  # a number of a step, an epoch or a save: step-20, checkpoint_3
        return "a checkpoint must be directly in $CKPT_DIR, named checkpoint-<step>"
    return None


def _world_of(session: Session, ranks: tuple[int, ...]) -> World | None:
    """Return this process's place among all ranks; ``None``: unknown."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        set_rank(rank)
    else:
        rank, size = 0, int(os.environ.get("WORLD_SIZE") or 1)
        if size > 1:
            return None
    if session.world is not None:
        return session.world if session.world.size == size else None
    if size == 1:
        return World()
    world = place_by_launcher(os.environ, rank, size)
    if world is None and len(ranks) == size and threading.current_thread() is threading.main_thread():
        return session.join().world  # all ranks are in this call
    return world


def _common_attempt(world: World) -> str:
    """Return the attempt of this start of the job; the first rank to ask chooses it."""
    if world.size == 1:
        return new_attempt()
    from torch.distributed.distributed_c10d import _get_default_store

    found: bytes = _get_default_store().compare_set("checkpoint_hook/attempt", "", new_attempt())
    return found.decode()


_lock = threading.RLock()
_watched: dict[str, _ScriptSave] = {}
"""By name: saves to publish, and the newest published one, which may still change. In the order of their begin."""


class _ScriptSave:
    """One rank's part of a save. The lowest rank of each node that takes part writes the marker."""

    def __init__(self, session: Session, world: World, ranks: tuple[int, ...], name: str) -> None:
        here = [rank for rank in ranks if rank in world.ranks]
        self._session = session
        self._world = world
        self._name = name
        self._folder = session.settings.dir / name
        self._publishes = world.rank == min(here)
        self._records = RankRecords(session.settings.dir, attempt=session.attempt, rank=world.rank, local_ranks=len(here))
        self._over = threading.Event()
        self._published: dict[str, tuple[int, int]] | None = None

    def begin(self) -> None:
        """Withdraw an earlier checkpoint of this name. No rank writes before all of them have made the library's call."""
        if (before := _watched.pop(self._name, None)) is not None:
            before._over.set()
        self._session.saves[self._name] += 1
        if self._publishes:
            remove_published(self._folder)
            self._records.clear(self._name)

    def written(self) -> None:
        """This rank's part is written."""
        session, step = self._session, contract.step_of(self._name)
        session.outcome = session.outcome or "succeeded"  # unless an exception or a signal ends this process
        session.tell_state("running", step or 0)
        if not self._publishes:
            self._records.record_part(self._name)
            return
        with _lock:
            _watched[self._name] = self
        _publish_at_exit()
        try:
            threading.Thread(target=self._watch, name="checkpoint-marker", daemon=True).start()
        except RuntimeError:  # the interpreter is exiting, where it is published
            return

    def _watch(self) -> None:
        before = self._files()
        while not self._over.wait(SETTLE_S if self._published is None else RECHECK_S):
            now = self._files()
            if now == before:
                _quietly(functools.partial(self.publish, now))
                with _lock:
                    is_newest = not _watched or next(reversed(_watched)) == self._name
                    if now == self._published and _watched.get(self._name) is self and not is_newest:
                        del _watched[self._name]
                        self._over.set()
            before = now

    def publish(self, files: dict[str, tuple[int, int]]) -> bool:
        """Write the marker if there is none, or files have changed. Returns false while a rank of this node still writes."""
        with _lock:
            if _watched.get(self._name) is not self or files == self._published:
                return True
            before = self._published
            if before is None and not self._records.record_part(self._name):
                return False
            if before is not None and not ((self._folder / contract.MARKER).exists() and set(files) >= set(before)):
                self._over.set()  # the script deletes it
                return True
            try:
                finish(self._folder, self._marker())
            except (OSError, contract.ContractError) as error:
                warn(f"{self._name} could not be published ({error}); the script's own checkpoint is not touched")
                self._over.set()
                return True
            self._published = files
            self._records.finished(self._name)
        info(f"published {self._name}, which the script saved" + ("" if before is None else ", anew: it has added files"))
        return True

    def _marker(self) -> contract.Marker:
        return contract.Marker(
            step=contract.step_of(self._name),
            reason="periodic",
            created_at=contract.rfc3339(time.time()),
            attempt=self._session.attempt,
            save_id=str(self._session.saves[self._name]),
            node=contract.Node(self._world.node, self._world.nodes),
            world_size=self._world.size,
            files=listed_files(self._folder),
            meta={contract.META_OWNER: contract.SCRIPT_OWNED},
        )

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return size and modification time of each file."""
        try:
            return {f.path: (f.size_bytes, (self._folder / f.path).stat().st_mtime_ns) for f in listed_files(self._folder)}
        except (OSError, contract.ContractError):
            return {}

    def publish_at_exit(self) -> None:
        """Publish now: no more files will be added."""
        self._over.set()
        until_s = time.monotonic() + EXIT_TIMEOUT_S
        while os.getpid() == self._session.pid and not self.publish(self._files()) and time.monotonic() < until_s:
            time.sleep(0.02)


@functools.cache
def _publish_at_exit() -> None:
    import atexit

    def publish() -> None:
        for save in list(_watched.values()):
            _quietly(save.publish_at_exit)

    atexit.register(publish)  # after the session's own, so it runs before the wait for durability


def remove_published(folder: Path) -> None:
    """Delete the marker and the published files of a folder that is about to be written again. Newer files stay.

    Writing them in place would change the files that the sidecar holds by hard links.
    """
    try:
        published_ns = (folder / contract.MARKER).stat().st_mtime_ns
        (folder / contract.MARKER).unlink()
    except OSError:
        return
    for file in listed_files(folder):
        with contextlib.suppress(OSError):
            if (folder / file.path).stat().st_mtime_ns <= published_ns:
                (folder / file.path).unlink()
