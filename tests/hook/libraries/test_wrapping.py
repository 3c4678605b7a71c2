"""Calls of ``train()`` that the hook does not change. With stand-ins for the library; other files train with the real one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_hook.libraries.transformers.driver import TrainerDriver
from trainer_hook.libraries.transformers.trainer import patch


class Trainer:
    """Tells what it was called with."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """The original."""
        return resume_from_checkpoint, trial, kwargs


@pytest.fixture
def trainer() -> type[Trainer]:
    return type("Trainer", (Trainer,), {"train": Trainer.train})


def patched(trainer: Any, *, pid: int) -> Any:
    patch(SimpleNamespace(Trainer=trainer), lambda: SimpleNamespace(pid=pid))  # type: ignore[arg-type, return-value]
    return trainer()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_trial_of_a_search_goes_straight_to_the_library(by_name: bool, trainer: Any) -> None:
    one = patched(trainer, pid=os.getpid())
    trial = {"learning_rate": 1e-3}
    called = one.train("path", trial=trial, ignore=1) if by_name else one.train("path", trial, ignore=1)
    assert called == ("path", trial, {"ignore": 1})


def test_a_forked_child_trains_without_the_hook(trainer: Any) -> None:
    assert patched(trainer, pid=os.getpid() + 1).train(True) == (True, None, {})


def test_a_call_inside_a_call_is_not_hooked_again(trainer: Any) -> None:
    one = patched(trainer, pid=os.getpid())
    one._checkpoint_hook = True
    assert one.train() == (None, None, {})


def test_a_call_inside_one_of_another_trainer_is_a_part_of_its_step(trainer: Any) -> None:
    session = SimpleNamespace(pid=os.getpid(), is_inner_call=lambda: True)
    patch(SimpleNamespace(Trainer=trainer), lambda: session)  # type: ignore[arg-type, return-value]
    assert trainer().train("path") == ("path", None, {})


def test_the_wrapped_method_still_looks_like_the_original(trainer: Any) -> None:
    train = patched(trainer, pid=os.getpid()).train
    assert (train.__name__, train.__doc__) == ("train", "The original.")


class JITCheckpointCallback:
    """Named as the library's own."""


@pytest.mark.parametrize("jit", [True, False])
def test_the_librarys_own_jit_checkpoint_gives_way_only_to_another(jit: bool, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks: list[Any] = [JITCheckpointCallback(), "another"]
    handler = SimpleNamespace(callbacks=callbacks, remove_callback=callbacks.remove)
    taken: list[bool] = []
    session = SimpleNamespace(settings=SimpleNamespace(jit=jit), stop=SimpleNamespace(install_again=lambda: taken.append(True)))
    TrainerDriver(session, SimpleNamespace(callback_handler=handler), None).replace_builtin_jit()  # type: ignore[arg-type]
    assert len(callbacks) == (1 if jit else 2)
    assert taken == ([True] if jit else [])
    assert ("enable_jit_checkpoint is replaced" in capsys.readouterr().err) == jit


def test_what_was_saved_before_a_call_began_anew_with_a_smaller_batch_is_saved_again() -> None:
    session = SimpleNamespace(saved={"checkpoint-3"})
    driver = TrainerDriver(session, None, None)  # type: ignore[arg-type]
    driver.begin()
    session.saved.add("checkpoint-5")
    driver.begin()
    assert session.saved == {"checkpoint-3"}, "the one that is resumed from stays as it is"
