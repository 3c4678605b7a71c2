"""State that the reader of a checkpoint would refuse: the reader says so before the save, and nothing else is refused."""

from __future__ import annotations

import enum
import io
import json
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hook.job import SCRIPTS, Answers, finished, training
from tests.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from trainer_hook.saving import readable
else:
    torch, readable = LazyModule("torch"), LazyModule("trainer_hook.saving.readable")


class Mode(enum.StrEnum):
    A = "a"


class Level(enum.IntEnum):
    A = 1


Pair = namedtuple("Pair", "a b")


def checked(state: Any) -> Any:
    return readable.readable(state, "state", readable.load_plain)


def is_read(state: Any) -> bool:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


numbers = st.sampled_from(
    [np.float64(0.1), np.float32(0.1), np.float16("nan"), np.int8(-3), np.uint64(1 << 63), np.bool_(True)]
)
others = st.sampled_from(
    [Mode.A, Level.A, Pair(1, 2), b"", b"x", frozenset([1]), np.datetime64(1, "ns"), np.bytes_(b"a"), 1j, int]
)
hashable = st.none() | st.integers() | st.text() | numbers | others
states = st.recursive(
    hashable | st.just(np.zeros(2)),
    lambda inner: (
        inner.map(lambda value: defaultdict(None, a=value))
        | st.lists(inner)
        | st.dictionaries(hashable, inner)
        | st.tuples(inner)
        | inner.map(lambda value: OrderedDict(a=value))
    ),
    max_leaves=6,
)


@given(states)
def test_a_state_is_refused_if_the_reader_refuses_it_and_else_it_is_read_again(state: Any) -> None:
    try:
        taken = checked(state)
    except readable.StateMismatch:
        assert not is_read(state)
    else:
        assert is_read(taken)
        assert str(taken) == str(_plain(state))


def _plain(state: Any) -> Any:
    """Return a state with the values of numpy's scalars, in the slow way."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) in (dict, OrderedDict):
        return type(state)({_plain(key): _plain(value) for key, value in state.items()})
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


@pytest.mark.parametrize(
    ("part", "kind"),
    [(Mode.A, "Mode"), (np.longdouble("0.1"), "longdouble"), (np.zeros(2), "ndarray"), (b"", "bytes"), (Pair(1, 2), "Pair")],
)
def test_what_cannot_be_read_again_is_named_with_its_path(part: Any, kind: str) -> None:
    with pytest.raises(readable.StateMismatch, match=rf"^state\.last\[1\]\.a is a .*{kind}, .*add_safe_globals"):
        checked({"last": [1, {"a": part}]})


def test_so_is_a_key_of_any_class() -> None:
    with pytest.raises(readable.StateMismatch, match=r"^a key of state\['by mode'\] is a .*Level"):
        checked({"by mode": {Level.A: 1}})


def test_so_is_a_tensor_of_a_class_that_the_reader_does_not_know() -> None:
    class Tagged(torch.Tensor):
        pass

    with pytest.raises(readable.StateMismatch, match=r"^state\.ema is a .*Tagged"):
        checked({"x": torch.zeros(2), "ema": torch.zeros(2).as_subclass(Tagged)})


def test_a_class_that_the_script_allows_is_read() -> None:
    with torch.serialization.safe_globals([Mode]):
        assert checked([Mode.A]) == [Mode.A]
    with pytest.raises(readable.StateMismatch):
        checked([Mode.A])


def test_a_state_that_contains_itself_is_taken_and_stays_as_it_is() -> None:
    state: list[Any] = [np.float64(0.5), shared := [1]]
    state += [state, shared]
    taken = checked(state)
    assert type(taken[0]) is float
    assert taken[2] is taken
    assert taken[3] is taken[1]


def test_tensors_are_not_copied() -> None:
    state = {"lr": np.float64(0.1), "mean": torch.zeros(4)}
    assert checked(state)["mean"] is state["mean"]


def test_the_reader_is_not_asked_about_plain_values_and_tensors() -> None:
    """Millions of numbers, and an optimizer's state of tens of thousands of tensors, cost C's pickler alone."""
    asked: list[Any] = []

    def load(file: Any) -> Any:
        asked.append(len(torch.load(file, weights_only=True)))

    state = {"seen": list(range(100_000)), "moments": [torch.zeros(2) for _ in range(1000)]}
    for _ in range(2):
        assert readable.readable(state, "state", load) is state
    assert asked == [1]  # one tensor, in the first save


def hard_to_save(**told: Any) -> list[str]:
    import sys

    return [sys.executable, str(SCRIPTS / "hard_to_save.py"), json.dumps(told)]


def local(volume: Path, answers: Answers) -> dict[str, str]:
    """Return settings with which a sidecar offers what is newest on the volume."""

    def newest(_: Any) -> Any:
        steps = [name for name in finished(volume) if name != "final"]
        return 202, {"state": "ready", "checkpoint": steps[-1], "source": "local"} if steps else {"state": "none"}

    answers.by_call["POST /v1/resume"] = newest
    return answers.settings | {"CKPT_SAVE_STRATEGY": "no"}


@pytest.mark.parametrize("more", [{}, pytest.param({"CKPT_ASYNC": "1", "CKPT_SAVE_STRATEGY": "steps", "CKPT_SAVE_STEPS": "1"})])
def test_a_trainer_with_numpys_numbers_and_tied_weights_resumes_exactly(
    more: dict[str, str], volume: Path, answers: Answers
) -> None:
    """Its optimizer and scheduler were saved and never loaded again, its model was never saved at all."""
    settings = local(volume, answers) | more
    with training(hard_to_save(sleep_s=0.2), volume, settings) as first:
        first.at_step(4)
        assert first.terminate() == 143, first.log()
    with training(hard_to_save(), volume, settings) as second:
        assert second.wait() == 0, second.log()
    with training(hard_to_save(), volume, {"CKPT_DIR": ""}, hooked=False) as alone:
        assert alone.wait() == 0, alone.log()
    assert second.steps()[0] == first.steps()[-1] + 1
    assert second.weights() == alone.weights()
    assert (
        first.log().count("share memory, which safetensors does not write: the model's weights are in pytorch_model.bin") == 1
    )


@pytest.mark.parametrize("own", [False, True])
def test_what_could_not_be_read_again_is_told_at_the_first_step_and_never_published(
    own: bool, volume: Path, answers: Answers
) -> None:
    with training(hard_to_save(sleep_s=0.2, enum=True, own=str(volume) * own), volume, local(volume, answers)) as running:
        running.said("nothing can be saved while this is so: optimizer.param_groups[0].mode is a __main__.Mode")
        assert "could not be saved" not in running.log()
        running.at_step(3)
        assert running.terminate() == 143, running.log()
    assert finished(volume) == []
    assert ("checkpoint-2, which the script saved, is not published: optimizer" in running.log()) is own
    assert "Traceback" not in running.log()


def test_a_type_of_tensor_that_save_pretrained_does_not_write_is_told_at_the_first_step(volume: Path, answers: Answers) -> None:
    with training(hard_to_save(sleep_s=0.2, complex=True), volume, local(volume, answers)) as running:
        running.said("nothing can be saved while this is so: model.angles is torch.complex128")
        running.at_step(3)
        assert running.terminate() == 143, running.log()
    assert finished(volume) == []
