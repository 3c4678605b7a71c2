"""Saving a step, with every library: each provides a ``StepWriter``."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook import contract
from trainer_hook.asynchronous.background import Background, Captured, fits
from trainer_hook.process.log import info, warn
from trainer_hook.process.session import Session
from trainer_hook.saving.disk_admission import DiskAdmission
from trainer_hook.saving.failed_saves import save_failed
from trainer_hook.saving.partial_saves import PartialSaves
from trainer_hook.saving.schedule import surplus
from trainer_hook.saving.sharded_failures import sharded_failures
from trainer_hook.volume.checkpoint_folder import check_writable, finish, finished_on, listed_files, remove, remove_wholly
from trainer_hook.volume.doubts import is_among, of_other_runs
from trainer_hook.volume.publish import make_system_folders
from trainer_hook.volume.rank_records import RankRecords
from trainer_hook.volume.retry import retried

STAGING = f"{contract.SYSTEM_DIR}/saving"
"""Folder for libraries that name a step's folder themselves. It is then renamed, to count the steps of earlier calls."""
REPORTED_WAIT_S = 0.5
POLL_S = 0.2
RETRY_S = 0.5
"""Pause before the second try of a just-in-time save."""
SAVE_MARGIN_S = 4.0
"""Seconds before the end of the grace period at which an asynchronous save is given up, so that the process can still exit."""


class StepWriter:
    """Every method is called on every rank at the same step. Any exception is logged, and training goes on."""

    names_folder = False
    """Whether the library itself names the folder of a step, by the step within its ``train()`` call."""
    may_write_part = False
    """Whether the script's code decides what is written, so that ``lacking`` is asked."""

    def write(self, folder: Path) -> None:
        """Write this rank's files of the current step. The folder need not exist."""
        raise NotImplementedError

    def lacking(self, files: Mapping[str, int]) -> list[str]:
        """Return what rank 0 would lack for a resume from what it has written. ``files``: size in bytes by path."""
        return []

    def unreadable(self) -> list[str]:
        """Return what of this rank's present state a save could not write so that a resume reads it again, and why."""
        return []

    def write_final(self, folder: Path) -> None:
        """Write this rank's files of the final model. The folder need not exist."""
        raise NotImplementedError

    def meta(self) -> Mapping[str, Any]:
        """Return what the marker of every checkpoint says under ``meta``."""
        return {}

    def expected_bytes(self) -> int:
        """Return the estimated size of the first checkpoint; 0: unknown."""
        return 0

    def overlapping_optimizer(self) -> Any:
        """Return the optimizer whose ``step()`` alone changes parameters, so that a snapshot may overlap with training.

        ``None``: other code may change them; the snapshot is complete before training goes on.
        """
        return None


@dataclass(frozen=True, slots=True)
class _Save:
    name: str
    reason: str
    meta: Mapping[str, Any]
    began_s: float
    """Monotonic."""


class StepSaver:
    """Saves steps of one ``train()`` call. Every method is called on every rank at the same step."""

    def __init__(self, session: Session, writer: StepWriter, background: Background | None = None) -> None:
        """With ``background`` periodic saves are asynchronous."""
        self._session = session
        self._writer = writer
        self._consensus = session.join()
        self._volume = session.settings.dir
        self._world = world = self._consensus.world
        self.records = RankRecords(self._volume, attempt=session.attempt, rank=world.rank, local_ranks=world.local_size)
        with contextlib.suppress(OSError):
            make_system_folders(self._volume)
        self._last_bytes = 0
        self._partial = PartialSaves(writer, self._consensus)
        self._admission = DiskAdmission(self._volume, session.client)
        self.background = background
        self._latest_name: str | None = None
        """Step that was saved last, or tried."""
        self._latest_failed = False
        """This rank's part of that step is not saved: the save failed, or is in flight."""
        self._in_flight = False
        """An asynchronous save of that step was started and has not been waited for."""
        self._waited = False
        """The latest ``settle`` waited for an asynchronous save, which succeeded."""
        self._save_s = 0.0
        """Duration of the latest save, in seconds."""
        self.step_seconds: float | None = None
        """For the marker: seconds per step; ``None``: unknown."""

    def name(self, global_step: int) -> str:
        """Return the name of a step of this call: steps count on through all ``train()`` calls of the script."""
        return contract.checkpoint_name(self._session.base_step + global_step)

    def save(self, global_step: int, reason: str, meta: Mapping[str, Any] | None = None) -> bool:
        """Save a step of this call. Returns whether this rank's part was written, now or before.

        An error is logged and never stops training. All ranks save a step or none does, so that they stay at the same step. A
        step that a rank could not save is tried again when it is asked for again.

        Args:
            global_step: The step, counted in this call.
            reason: ``periodic``, ``manual`` or ``jit``.
            meta: Additions to the marker's ``meta``.
        """
        if self._partial.are_usual:
            return False
        name, urgent = self.name(global_step), reason == "jit"
        was_saved, is_latest = name in self._session.saved, name == self._latest_name
        is_asynchronous = self.background is not None and reason == "periodic"
        if was_saved and not urgent and (is_asynchronous or not is_latest):  # in flight perhaps: it is not waited for
            return True
        self.settle()
        if was_saved and (not is_latest or self._consensus.all_agree(not self._latest_failed)):
            return True
        self._session.saved.add(name)
        self._session.saves[name] += 1
        save = _Save(name, reason, meta or {}, time.monotonic())
        if not self._consensus.all_agree(self._prepare(name, urgent=urgent)):
            self._session.saved.discard(name)
            return False
        wrote, captured, self._latest_name, self._latest_failed = True, None, name, False
        try:
            with sharded_failures():
                captured = self._begin(save, global_step)
        except Exception as error:
            self._failed(name, error)
            wrote = False
        if self._is_staged and self._consensus.all_agree(wrote) and self._world.local_rank == 0:
            wrote = self._leave_staging(global_step, name)
        deferred = () if captured is None else captured.paths
        if not self._partial.is_whole(self._volume / name, deferred=deferred, wrote=wrote):
            self._drop_part(name, captured)
            return False
        if captured is not None and wrote:
            self._finish_later(captured, save)
            return True
        if captured is not None:
            captured.give_up()
        self._latest_failed = not (wrote and self._finish(save))
        return not self._latest_failed

    def save_just_in_time(self, global_step: int, meta: Mapping[str, Any] | None = None) -> bool:
        """Save the last step of this process as ``save`` does; once more if a rank could not write it and a save still fits.

        A fault of the volume may pass, and nothing else saves this step. Where a rank has died since, it is not tried again.
        """
        began_s = time.monotonic()
        saved = self.save(global_step, "jit", meta)
        took_s, left_s = time.monotonic() - began_s, self._session.stop.left_s()
        is_lost = self._latest_failed and self._latest_name == self.name(global_step)
        try:
            is_enough = self._consensus.all_agree(not (is_lost and fits(expected_s=took_s + RETRY_S, left_s=left_s)))
        except RuntimeError:  # of a rank that has died; this process still ends as preempted
            is_enough = True
        if is_enough:
            return saved
        time.sleep(RETRY_S)
        return self.save(global_step, "jit", meta)

    def settle(self) -> None:
        """Wait until no asynchronous save is in flight."""
        self._waited, in_flight, self._in_flight = False, self._in_flight, False
        if self.background is None or not in_flight:
            return
        began_s = time.monotonic()
        while not self.background.wait(POLL_S):  # a termination notice may come meanwhile
            noticed = self._session.stop.notice_at_s is not None
            if noticed and self._session.stop.left_s() <= SAVE_MARGIN_S and time.monotonic() - began_s >= 1.0:
                warn(f"{self._latest_name} is still being written and cannot be waited for any longer")
                return
        self._waited = not self._latest_failed
        if (waited_s := time.monotonic() - began_s) > REPORTED_WAIT_S:
            info(f"training waited {waited_s:.1f} s for {self._latest_name}")

    def end(self) -> None:
        """Wait for the asynchronous save in flight, and free its memory. May be repeated."""
        self.settle()
        if self.background is not None:
            self.background.close()

    def _finish_later(self, captured: Captured, save: _Save) -> None:
        assert self.background is not None
        self._in_flight = self._latest_failed = True
        held_s = time.monotonic() - save.began_s

        def then(error: Exception | None) -> None:
            if error is not None:
                self._failed(save.name, error)
            elif self._finish(save, held_s=held_s):
                self._latest_failed = False

        self.background.start(captured, self._volume / save.name, then)

    @property
    def _is_staged(self) -> bool:
        """Whether the library names the folder of a step differently: in the second ``train()`` call and later."""
        return self._writer.names_folder and self._session.base_step > 0

    def _prepare(self, name: str, *, urgent: bool) -> bool:
        if self.background is not None and self.background.busy:
            return False  # the grace period is nearly over: the save in flight cannot be waited for
        if self._world.local_rank != 0:
            return True
        try:
            if not (self._is_worth_trying() if urgent else self._admission.fits(self._expected_bytes())):
                self._session.not_saved[name] = None
                if self._admission.refusal is not None:
                    self._session.tell_saves(self._admission.refusal)
                return False
            self._volume.stat()  # a writer would make it anew, and hide a missing mount
            remove(self._volume / name)  # half-written, or of an earlier attempt that was abandoned
            remove_wholly(self._volume / STAGING)
            self.records.clear(name)
            check_writable(self._volume / name)  # an error in the write leaves the other ranks waiting in collectives
        except OSError as error:
            self._failed(name, error)
            self._latest_name, self._latest_failed = name, True
            return False
        return True

    def _is_worth_trying(self) -> bool:
        """Whether a just-in-time save can end in time; without an asynchronous save before it, it is always tried."""
        if not self._waited or fits(expected_s=self._save_s, left_s=self._session.stop.left_s()):
            return True
        info(f"no newer checkpoint: a save takes about {self._save_s:.1f} s, {self._session.stop.left_s():.1f} s are left")
        return False

    def _expected_bytes(self) -> int:
        """Return the estimated size of the next checkpoint; 0: unknown."""
        if self._world.local_size > 1:  # another rank may have finished the last one, and a writer knows its own rank's part
            return self._newest_on_volume_bytes() or self._writer.expected_bytes()
        return self._last_bytes or self._writer.expected_bytes() or self._newest_on_volume_bytes()

    def _newest_on_volume_bytes(self) -> int:
        steps = {step: c for c in finished_on(self._volume) if (step := contract.step_of(c.name)) is not None}
        return sum(file.size_bytes for file in steps[max(steps)].marker.files or ()) if steps else 0

    def make_room(self) -> None:
        """Have durable checkpoints leave the volume for a save that is tried in any case."""
        if self._world.local_rank == 0:
            with contextlib.suppress(OSError):
                self._admission.make_room(self._expected_bytes())

    def _begin(self, save: _Save, global_step: int) -> Captured | None:
        """Write the step, or take its snapshot. ``None``: all of it is written.

        Only a periodic save is asynchronous: a manual one has a caller that waits, after a just-in-time one training ends.
        """
        folder = self._volume / (f"{STAGING}/{contract.checkpoint_name(global_step)}" if self._is_staged else save.name)
        if self.background is None or save.reason != "periodic":
            self._writer.write(folder)
            return None
        write = functools.partial(self._writer.write, folder)
        return self.background.capture(folder, write, optimizer=self._writer.overlapping_optimizer())

    def _leave_staging(self, global_step: int, name: str) -> bool:
        try:
            (self._volume / STAGING / contract.checkpoint_name(global_step)).rename(self._volume / name)
        except OSError as error:
            self._failed(name, error)
            return False
        return True

    def _drop_part(self, name: str, captured: Captured | None) -> None:
        if captured is not None:
            captured.give_up()
        self._session.saved.discard(name)
        self._session.not_saved[name] = None
        if self._world.local_rank == 0:  # all ranks have written
            with contextlib.suppress(OSError):
                remove(self._volume / name)

    def _failed(self, name: str, error: Exception, *, deletes: bool = True) -> None:
        expected, folders = self._last_bytes or self._writer.expected_bytes(), (self._volume / name, self._volume / STAGING)
        save_failed(self._session, name, error, expected_bytes=expected, folders=folders if deletes else ())

    def _finish(self, save: _Save, *, held_s: float | None = None) -> bool:
        folder = self._volume / save.name
        try:
            folder.mkdir(exist_ok=True)  # a node whose ranks write no file has a marker, too
            if self.records.record_part(save.name):
                marker = self.marker(folder, save.reason, save.meta)
                finish(folder, marker)
                self._last_bytes = sum(file.size_bytes for file in marker.files or ())
                self.records.finished(save.name)
        except (OSError, contract.ContractError) as error:
            self._failed(save.name, error)
            return False
        self._session.not_saved.pop(save.name, None)
        self._session.tell_saves(None)
        self._rotate(save.name)
        self._save_s = time.monotonic() - save.began_s
        held = "" if held_s is None else f", training held for {held_s:.2f} s"
        size = f"{self._last_bytes / 1e6:.1f} MB in " if self._last_bytes else ""  # known to the rank that finished it
        info(f"saved {save.name} ({save.reason}, {size}{self._save_s:.2f} s{held})")
        return True

    def marker(self, folder: Path, reason: str, meta: Mapping[str, Any], *, global_step: int | None = None) -> contract.Marker:
        """Return the marker of a folder with all of its files. ``global_step``: where the folder's name has no step."""
        session, world = self._session, self._world
        base = {contract.META_TRAIN_CALL: session.train_calls, "base_step": session.base_step}
        origin = {} if session.origin is None else {contract.META_RESUMED_FROM: session.origin}
        return contract.Marker(
            step=contract.step_of(folder.name) if global_step is None else session.base_step + global_step,
            reason=reason,
            created_at=contract.rfc3339(time.time()),
            attempt=session.attempt,
            save_id=str(session.saves[folder.name]),
            node=contract.Node(world.node, world.nodes),
            world_size=world.size,
            global_step_seconds=self.step_seconds,
            files=listed_files(folder),
            meta={**base, **self._writer.meta(), **meta, **origin},
        )

    def _rotate(self, name: str) -> None:
        """Delete finished steps beyond ``CKPT_SAVE_TOTAL_LIMIT`` after one was saved. An error loses nothing but space."""
        session, step = self._session, contract.step_of(name)
        limit = session.settings.save_total_limit
        if limit is None or step is None or self._world.local_rank != 0:
            return
        try:
            others = of_other_runs(self._volume)
        except OSError:  # it is unknown which checkpoints are of another run
            return
        own = [
            c
            for c in finished_on(self._volume)
            if not contract.is_script_owned(c.marker.meta) and not is_among(others, self._volume / c.name)
        ]
        saves = {at: c.marker.attempt for c in own if (at := contract.step_of(c.name)) is not None}
        resumed_step = (session.origin or {}).get("step")
        for gone in surplus(saves, limit=limit, step=step, attempt=session.attempt, resumed_step=resumed_step):
            try:
                remove_wholly(self._volume / contract.checkpoint_name(gone))
            except OSError as error:
                warn(f"{contract.checkpoint_name(gone)} could not be deleted: {error}")

    def save_final(self, global_step: int) -> None:
        """Write the final model to ``final/``."""
        folder = self._volume / contract.FINAL
        if not self._consensus.all_agree(self._world.local_rank != 0 or self._clear_final(folder)):
            return
        self._session.saves[contract.FINAL] += 1
        try:
            with sharded_failures():
                self._writer.write_final(folder)
            retried(functools.partial(folder.mkdir, exist_ok=True))
            if self.records.record_part(contract.FINAL):
                finish(folder, self.marker(folder, "final", {}, global_step=global_step))
                self.records.finished(contract.FINAL)
        except Exception as error:
            self._failed(contract.FINAL, error)
            with contextlib.suppress(OSError):
                self.records.end(contract.FINAL)
            return
        info(f"saved final/ (step {self._session.base_step + global_step})")

    def _clear_final(self, folder: Path) -> bool:
        """Delete an earlier final model. Returns whether one can be written now."""
        try:
            if not retried(functools.partial(self.records.may_replace, folder)):
                warn(f"{folder} holds other files than a checkpoint's: the final model is not saved there")
                return False
            retried(functools.partial(self.records.begin_anew, folder))
        except OSError as error:
            self._failed(contract.FINAL, error, deletes=False)
            return False
        self.make_room()
        return True
