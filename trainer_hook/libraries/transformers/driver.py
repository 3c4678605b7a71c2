"""The Hugging Face Trainer as a driver: its own save methods write the checkpoints, redirected to the volume."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.libraries.transformers.checkpoint_files import (
    STATE,
    WEIGHTS_OF_TRAINER,
    missing_from,
    parse_state,
    read_state,
    state_bytes,
)
from trainer_hook.libraries.transformers.step_tail import META_UNFINISHED, StepTail
from trainer_hook.process.log import info, warn
from trainer_hook.process.patching import replaced
from trainer_hook.process.session import Session
from trainer_hook.process.training_progress import TrainingProgress, finite
from trainer_hook.resuming.resumer import Choice, Resumer
from trainer_hook.saving.async_save import WHOLE_STATE_ON_ONE_RANK, background_for
from trainer_hook.saving.readable import Load, checked, load_plain, unreadable
from trainer_hook.train_call.driver import Driver, ScriptCheckpoint

LIBRARIES = {"transformers", "trl", "peft", "accelerate", "trainer_hook"}
LOGGED = 20
"""Number of latest log entries among which the loss is looked for: evaluations log without one."""
_METHODS = ("training_step", "compute_loss", "prediction_step")
_READ_PLAIN = ("optimizer.pt", "scheduler.pt", "scaler.pt")
_EVENTS = ("on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_evaluate")


class TrainerDriver(Driver):
    """One ``train()`` call of a Hugging Face Trainer."""

    names_folder = True
    may_write_part = True

    def __init__(self, session: Session, trainer: Any, resume_from: Any) -> None:
        """``resume_from``: the script's ``resume_from_checkpoint``."""
        self._session = session
        self.trainer = trainer
        self._resume_from = resume_from
        self._saved_before: frozenset[str] | None = None
        self.tail = StepTail(trainer)

    @property
    def global_step(self) -> int:
        """As ``Driver.global_step``."""
        return int(self.trainer.state.global_step)

    def progress(self) -> TrainingProgress:
        """As ``Driver.progress``: the loss as Trainer logged it last."""
        state = self.trainer.state
        losses = (finite(entry.get("loss")) for entry in itertools.islice(reversed(state.log_history), LOGGED))
        total = int(state.max_steps)
        return TrainingProgress(total if total > 0 else None, next((loss for loss in losses if loss is not None), None))

    def replace_builtin_jit(self) -> None:
        """Remove Trainer's own callback for just-in-time checkpoints (``enable_jit_checkpoint``)."""
        if not self._session.settings.jit:
            return
        handler = self.trainer.callback_handler
        for callback in [c for c in handler.callbacks if type(c).__name__ == "JITCheckpointCallback"]:
            handler.remove_callback(callback)
            self._session.stop.install_again()
            info("enable_jit_checkpoint is replaced by this system's own just-in-time checkpoint")

    def begin(self) -> None:
        """Training begins; once more in the same call where ``auto_find_batch_size`` retries with a smaller batch.

        The steps that the larger batch saved are then of another run: they are saved again.
        """
        if self._saved_before is None:
            self._saved_before = frozenset(self._session.saved)
        else:
            self._session.saved &= self._saved_before

    def missing_files(self, files: Mapping[str, int], **ranks: Any) -> list[str]:
        """As ``Driver.missing_files``. Which weights a subclass loads that loads them itself is unknown."""
        load = getattr(type(self.trainer), "_load_from_checkpoint", None)
        is_trainers = getattr(load, "__module__", None) == "transformers.trainer"
        return missing_from(files, **ranks, weights=WEIGHTS_OF_TRAINER if is_trainers else None)

    def lacking(self, files: Mapping[str, int]) -> list[str]:
        """As ``StepWriter.lacking``: a subclass may write less (``_save_checkpoint``, ``_save``)."""
        return self.missing_files(files, rank=0, world_size=1, saved_world_size=0)

    def check(self, folder: Path) -> None:
        """As ``Driver.check``."""
        parse_state((folder / STATE).read_bytes())

    def reads_all(self) -> bool:
        """As ``Driver.reads_all``: DeepSpeed may be configured to read the files of all ranks."""
        if not getattr(self.trainer, "is_deepspeed_enabled", False):
            return False
        config = self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        elastic = config.get("zero_optimization", {}).get("elastic_checkpoint")
        return bool(elastic or config.get("checkpoint", {}).get("load_universal"))

    def background(self) -> Background | None:
        """As ``Driver.background``."""
        kind = _distributed_type(self.trainer)
        return background_for(self._session.settings, None if kind in WHOLE_STATE_ON_ONE_RANK else kind)

    def large_objects(self) -> Sequence[Any]:
        """As ``Driver.large_objects``."""
        return [self.trainer.model, self.trainer.optimizer] if self.trainer.args.should_save else []

    def script_checkpoint(self, choice: Choice | None, resumer: Resumer) -> ScriptCheckpoint | None:
        """As ``Driver.script_checkpoint``. One that cannot be resumed exactly is used only where there is no other."""
        resume_from = self._resume_from
        if resume_from is True:
            from transformers.trainer_utils import get_last_checkpoint

            folder = self.trainer.args.output_dir
            resume_from = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if not isinstance(resume_from, str | os.PathLike):
            return None
        named = Path(resume_from)
        lacking = resumer.lacks(named)
        if lacking and STATE not in lacking:  # what is no checkpoint of Trainer, Trainer itself says
            what = f"{named} has no {', '.join(lacking)}; was it saved with save_only_model? It cannot be resumed exactly"
            if choice is not None:
                info(f"{what}: {choice.name} is used")
                return None
            warn(f"{what}: Trainer takes its weights and begins the rest anew")
        return ScriptCheckpoint(named, read_state(named).get("global_step", 0))

    def interrupt(self) -> Mapping[str, Any]:
        """As ``Driver.interrupt``: an evaluation that is cut short is repeated by the resumed run."""
        self.tail.rewind()
        return self.tail.meta | ({META_UNFINISHED: list(self.tail.unfinished)} if self.tail.unfinished else {})

    def write(self, folder: Path) -> None:
        """As ``StepWriter.write``. Trainer names the folder by its own step."""
        with _redirected(self.trainer, str(folder.parent)), checked(folder, load_of), _any_tensors():
            self.trainer._save_checkpoint(self.trainer.model_wrapped, None)

    def unreadable(self) -> list[str]:
        """As ``StepWriter.unreadable``."""
        trainer = self.trainer
        if not trainer.args.should_save:
            return []
        states: list[tuple[str, Any]] = []
        if _distributed_type(trainer) in WHOLE_STATE_ON_ONE_RANK:
            states = [("optimizer", trainer.optimizer.state_dict), ("scheduler", trainer.lr_scheduler.state_dict)]
        reasons = unreadable((place, state, load_plain) for place, state in states)
        from transformers.trainer_callback import ExportableState

        from trainer_hook.loops.state_files import of_odd_type

        if states and hasattr(trainer.model, "save_pretrained") and (odd := of_odd_type(trainer.model.state_dict())):
            reasons.append(
                f"model.{odd}, which save_pretrained does not write: make it real tensors, or a buffer with persistent=False"
            )
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            try:
                json.dumps(each.state() if isinstance(each, ExportableState) else None)
            except (TypeError, ValueError) as error:
                reasons.append(
                    f"{STATE}: the state of {type(each).__name__} is not JSON ({error}): let its state() return JSON"
                )
        return reasons

    def write_final(self, folder: Path) -> None:
        """As ``StepWriter.write_final``, as the trainer's own ``save_model`` does."""
        with _any_tensors():
            self.trainer.save_model(str(folder), _internal_call=True)  # else it also pushes to the hub
        if self.trainer.args.should_save:
            folder.mkdir(exist_ok=True)
            self.trainer.state.save_to_json(str(folder / "trainer_state.json"))

    def expected_bytes(self) -> int:
        """As ``StepWriter.expected_bytes``."""
        return state_bytes(self.trainer)

    def overlapping_optimizer(self) -> Any:
        """As ``StepWriter.overlapping_optimizer``."""
        return overlapping_optimizer(self.trainer)


def load_of(name: str) -> Load | None:
    """Return Trainer's reader of a file, as of ``checked``. Random states are its own, and read with classes of numpy."""
    return load_plain if name in _READ_PLAIN else None


@contextlib.contextmanager
def _any_tensors() -> Iterator[None]:
    """Have Trainer save a model that is no ``PreTrainedModel`` also where safetensors would not write its tensors.

    It reads ``pytorch_model.bin`` where there is no ``model.safetensors``.
    """
    import safetensors.torch
    import torch

    from trainer_hook.loops.state_files import refused_by_safetensors

    original = safetensors.torch.save_file

    @functools.wraps(original)
    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(filename)
        if path.name == "model.safetensors" and (why := refused_by_safetensors(tensors)) is not None:
            _say_once(f"{why}, which safetensors does not write: the model's weights are in pytorch_model.bin")
            torch.save(tensors, path.with_name("pytorch_model.bin"))
        else:
            original(tensors, filename, *args, **kwargs)

    with replaced(safetensors.torch, "save_file", save_file):
        yield


@functools.cache
def _say_once(text: str) -> None:
    info(text)


@contextlib.contextmanager
def _redirected(trainer: Any, run_dir: str) -> Iterator[None]:
    """Redirect one save. The script's output_dir, rotation, hub, best model and callback states stay as they are."""
    args, state = trainer.args, trainer.state
    ours = {"save_only_model": False, "push_to_hub": False, "save_on_each_node": False, "save_total_limit": None}
    before = {name: getattr(args, name) for name in ours if hasattr(args, name)}
    best = state.best_model_checkpoint, getattr(state, "best_global_step", None)
    # A save replaces the callback states, and appends to the lists of several callbacks of one class.
    callback_states = {name: list(kept) if isinstance(kept, list) else kept for name, kept in state.stateful_callbacks.items()}
    # Some versions guard the attributes of TrainingArguments against plain assignment.
    for name in before:
        object.__setattr__(args, name, ours[name])
    try:
        with replaced(trainer, "_get_output_dir", lambda trial: run_dir):
            yield
    finally:
        for name, value in before.items():
            object.__setattr__(args, name, value)
        state.best_model_checkpoint = best[0]
        if best[1]:
            state.best_global_step = best[1]
        state.stateful_callbacks = callback_states


def _distributed_type(trainer: Any) -> str:
    for flag, name in (("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DEEPSPEED")):
        if getattr(trainer, flag, False):
            return name
    kind = getattr(getattr(trainer, "accelerator", None), "distributed_type", "of unknown kind")
    return str(getattr(kind, "value", kind))


def overlapping_optimizer(trainer: Any) -> Any:
    """Return the optimizer if only its next step will change parameters; else ``None``.

    The script's code between two steps may change them, and so does Trainer when training ends (``load_best_model_at_end``).
    """
    if trainer.control.should_training_stop:
        return None
    between = [getattr(trainer, name, None) for name in _METHODS]
    between += [getattr(c, event, None) for c in trainer.callback_handler.callbacks for event in _EVENTS]
    roots = {str(getattr(method, "__module__", None)).split(".")[0] for method in between if method is not None}
    return trainer.optimizer if roots <= LIBRARIES else None
