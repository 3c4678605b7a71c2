"""What is put around methods of one Trainer for the length of a call, and what its arguments stand for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer_hook.libraries.transformers.saver import Saver
from trainer_hook.libraries.transformers.step_tail import own_folder


@contextlib.contextmanager
def around(
    trainer: Any, method: str, during: Callable[[], contextlib.AbstractContextManager[None]], *, then: Callable[[], None]
) -> Iterator[None]:
    """Have each call of a method of one trainer run inside ``during``, and ``then`` after it."""
    original = getattr(trainer, method)

    @functools.wraps(original)
    def both(*args: Any, **kwargs: Any) -> Any:
        with during():
            result = original(*args, **kwargs)
        then()
        return result

    setattr(trainer, method, both)
    try:
        yield
    finally:
        delattr(trainer, method)


@contextlib.contextmanager
def before_own_saves(trainer: Any, saver: Saver) -> Iterator[None]:
    """Have the saver know before the script's schedule writes into a directory that was published."""
    original = trainer._save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if "_get_output_dir" not in vars(trainer):  # else the save is the hook's own
            saver.make_way_for_own(own_folder(trainer))
        return original(*args, **kwargs)

    trainer._save_checkpoint = save_checkpoint
    try:
        yield
    finally:
        del trainer._save_checkpoint


def named_by_script(trainer: Any, theirs: Any) -> Path | None:
    """Return the checkpoint that the script's own ``resume_from_checkpoint`` stands for."""
    if theirs is True:
        from transformers.trainer_utils import get_last_checkpoint

        folder = trainer.args.output_dir
        theirs = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    return Path(theirs) if isinstance(theirs, str | os.PathLike) else None
