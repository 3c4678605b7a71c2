"""Saves that the hook makes of a Hugging Face Trainer, beside the script's own, which stay as they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_hook.contract import MARKER, META_OWNER, SCRIPT_OWNED, ContractError
from trainer_hook.libraries.transformers.asynchronous import background_for, optimizer_that_waits
from trainer_hook.process.log import say, warn
from trainer_hook.process.session import Session
from trainer_hook.saving.async_save import prepare
from trainer_hook.saving.disk_admission import state_bytes
from trainer_hook.saving.step_saver import STAGING, StepSaver
from trainer_hook.volume.publish import finish, remove


class Saver(StepSaver):
    """Saves of a Hugging Face Trainer."""

    def __init__(self, session: Session, trainer: Any) -> None:
        super().__init__(session, background_for(session.settings, trainer))
        self._trainer = trainer
        self._said: set[str] = set()
        self._saved_before: frozenset[str] | None = None

    def begin(self) -> None:
        """Called when training begins. It begins anew inside one call where ``auto_find_batch_size`` tries a smaller batch.

        What was saved with the larger one is then another run's: it is written over, step by step.
        """
        if self._saved_before is None:
            self._saved_before = frozenset(self._session.saved)
        else:
            self._session.saved &= self._saved_before

    def get_ready(self) -> None:
        """Called once after the first step: what saves beside training need is taken while training goes on."""
        if self._background is not None:
            trainer = self._trainer
            prepare(self._background, [trainer.model, trainer.optimizer] if trainer.args.should_save else [])

    @property
    def _staged(self) -> bool:
        """Whether the Trainer's own name of a step differs from ours: in the second ``train()`` call and later."""
        return self._session.base_step > 0

    def _write(self, model: Any, global_step: int) -> None:
        with _redirected(self._trainer, str(self._volume / STAGING if self._staged else self._volume)):
            self._trainer._save_checkpoint(model, None)

    def _write_final(self, folder: Path) -> None:
        """As the trainer's own ``save_model`` does."""
        self._trainer.save_model(str(folder), _internal_call=True)  # else it also pushes to the hub
        if self._trainer.args.should_save:
            folder.mkdir(exist_ok=True)
            self._trainer.state.save_to_json(str(folder / "trainer_state.json"))

    def _expected_bytes(self) -> int:
        return state_bytes(self._trainer)

    def _optimizer_that_waits(self) -> Any:
        return optimizer_that_waits(self._trainer)

    def make_way_for_own(self, folder: Path) -> None:
        """The script is about to write into a directory that was published: what is pinned of it must not change."""
        published = folder.parent == self._volume and folder.name in self._session.saved
        if published:
            self.settle()
        if published and self._agreement.all_agree(True):
            if self._world.local_rank == 0:
                with contextlib.suppress(OSError):
                    remove(folder)
            self._agreement.all_agree(True)
            self._session.saved.discard(folder.name)

    def publish_own(self, folder: Path, global_step: int) -> None:
        """Mark a checkpoint that the script saved by its own schedule, if it lies on the volume and can be resumed from."""
        name = self.name(global_step)
        if name in self._session.saved or not folder.is_relative_to(self._volume):
            return
        if self._trainer.args.save_only_model:
            self._say_once("the script saves with save_only_model: nothing can be resumed from that, so it is not published")
            return
        self._session.saved.add(name)
        self._session.saves[name] += 1
        target = self._volume / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._records.wrote(name):
                if folder != target:
                    _link(folder, target)
                finish(target, self._marker(target, "periodic", {META_OWNER: SCRIPT_OWNED} if folder == target else {}))
                self._records.clear(name)
                say(f"published {name}, which the script saved")
        except (OSError, ContractError) as error:
            warn(f"{folder} could not be published ({error}); the script's own checkpoint is not touched")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


@contextlib.contextmanager
def _redirected(trainer: Any, run_dir: str) -> Iterator[None]:
    """Point one save elsewhere: the script's output_dir, rotation, hub, best model and state know nothing of it."""
    args, state = trainer.args, trainer.state
    ours = {"save_only_model": False, "push_to_hub": False, "save_on_each_node": False, "save_total_limit": None}
    before = {name: getattr(args, name) for name in ours if hasattr(args, name)}
    best = state.best_model_checkpoint, getattr(state, "best_global_step", None)
    # A save writes them anew, and appends to those of several callbacks of one class.
    told = {name: list(kept) if isinstance(kept, list) else kept for name, kept in state.stateful_callbacks.items()}
    # Instance attributes of TrainingArguments are guarded against plain assignment in some versions.
    for name in before:
        object.__setattr__(args, name, ours[name])
    trainer._get_output_dir = lambda trial: run_dir
    try:
        yield
    finally:
        del trainer._get_output_dir
        for name, value in before.items():
            object.__setattr__(args, name, value)
        state.best_model_checkpoint = best[0]
        if best[1]:
            state.best_global_step = best[1]
        state.stateful_callbacks = told


def _link(source: Path, target: Path) -> None:
    remove(target)
    for place, _, names in os.walk(source):
        inside = target / Path(place).relative_to(source)
        inside.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name != MARKER:
                os.link(Path(place, name), inside / name, follow_symlinks=False)
