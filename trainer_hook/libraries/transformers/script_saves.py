"""Checkpoints that the script's own Trainer schedule writes: published where they lie on the volume."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from trainer_hook.contract import FINAL, MARKER, META_OWNER, SCRIPT_OWNED, ContractError
from trainer_hook.libraries.transformers.driver import TrainerDriver, load_of
from trainer_hook.libraries.transformers.step_tail import script_folder
from trainer_hook.process.log import info, warn
from trainer_hook.process.patching import replaced
from trainer_hook.saving.partial_saves import PartialSaves
from trainer_hook.saving.readable import StateMismatch, checked
from trainer_hook.train_call.train_call import TrainCall
from trainer_hook.volume.checkpoint_folder import empty, finish, remove


class ScriptSaves:
    """The script's saves during one ``train()`` call. Every method is called on every rank at the same step."""

    def __init__(self, call: TrainCall, driver: TrainerDriver) -> None:
        self._call = call
        self._tail = driver.tail
        self._trainer = driver.trainer
        self._session = call.session
        self._volume = Path(os.path.realpath(call.session.settings.dir))
        self._was_refused = False
        self._refusal: StateMismatch | None = None
        """Why no run could resume from what the script saved last."""
        self._partial = PartialSaves(driver, call.consensus)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Withdraw a published checkpoint before the script's schedule writes into its folder."""
        trainer, original = self._trainer, self._trainer._save_checkpoint

        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if "_get_output_dir" in vars(trainer):  # the save is the hook's own
                return original(*args, **kwargs)
            self._withdraw(self._folder())
            self._refusal = None
            with checked(script_folder(trainer), load_of, self._refused):
                return original(*args, **kwargs)

        return replaced(trainer, "_save_checkpoint", save_checkpoint)

    def _refused(self, error: StateMismatch) -> None:
        self._refusal = error

    def _folder(self) -> Path:
        """Return the folder of the script's own save of the current step, without links and ``..`` on the way to it."""
        folder = script_folder(self._trainer)
        return Path(os.path.realpath(folder.parent)) / folder.name

    def _withdraw(self, folder: Path) -> None:
        """Delete a published checkpoint: the sidecar holds its files by hard links, so they must not be written in place."""
        if folder.parent != self._volume or folder.name not in self._session.saved:
            return
        self._call.saver.settle()
        if self._call.consensus.all_agree(True):
            if self._call.consensus.world.local_rank == 0:
                with contextlib.suppress(OSError):
                    remove(folder)
            self._call.consensus.all_agree(True)
            self._session.saved.discard(folder.name)

    def publish(self) -> None:
        """Publish the step that the script has just saved, if it lies on the volume and can be resumed from."""
        folder, saver = self._folder(), self._call.saver
        name = saver.name(self._trainer.state.global_step)
        if name in self._session.saved or not folder.is_relative_to(self._volume):
            return
        if self._trainer.args.save_only_model:
            if not self._was_refused:
                info("the script saves with save_only_model: nothing can be resumed from that, so it is not published")
            self._was_refused = True
            return
        if not self._call.consensus.all_agree(self._refusal is None):
            if self._refusal is not None:
                warn(f"{name}, which the script saved, is not published: {self._refusal}")
            return
        if self._partial.are_usual or not self._partial.is_whole(folder):
            return
        self._session.saved.add(name)
        self._session.saves[name] += 1
        target = self._volume / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if saver.records.record_part(name):
                is_there = target.exists() and target.samefile(folder)
                if not is_there:
                    _link(folder, target)
                owner = {META_OWNER: SCRIPT_OWNED} if is_there else {}
                finish(target, saver.marker(target, "periodic", self._tail.meta | owner))
                saver.records.finished(name)
                info(f"published {name}, which the script saved")
        except (OSError, ContractError) as error:
            warn(f"{folder} could not be published ({error}); the script's own checkpoint is not touched")


def leave_final(volume: Path, folder: Path) -> None:
    """Leave ``final/`` to a script that saves a model there. The sidecar holds the files of ours by hard links."""
    final = volume / FINAL
    with contextlib.suppress(OSError):
        if os.path.realpath(folder) != os.path.realpath(final) or not (final / MARKER).exists():
            return
        empty(final)
    info("the script saves a model in final/: that one is not published; name its folder otherwise, or write final/.complete")


def _link(source: Path, target: Path) -> None:
    remove(target)
    for place, _, names in os.walk(source):
        inside = target / Path(place).relative_to(source)
        inside.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name != MARKER:
                os.link(Path(place, name), inside / name, follow_symlinks=False)
