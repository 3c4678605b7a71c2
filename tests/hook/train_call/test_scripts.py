"""A script's own folders, limits, callbacks, subclasses and resume are not changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hook.conftest import pod
from tests.hook.job import Answers, Training, answering, finished, marker, script, trainer_state, training
from tests.hook.versions import TRAINER_5
from tests.process.sidecar_process import until

pytestmark = pytest.mark.slow

SCRIPT_SAVES = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 10}


def ready(name: str, **meta: Any) -> Callable[[Any], Any]:
    """Answer every resume request with a checkpoint on the volume; older ones by their name."""

    def answer(asked: Any) -> Any:
        wanted = asked["checkpoint"] if asked else "latest"
        chosen = name if wanted == "latest" else wanted
        return 202, {"state": "ready", "checkpoint": chosen, "source": "local", "meta": meta}

    return answer


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run to the end: the script saves each 4th step in its own directory, the hook each 6th on the volume."""
    path = tmp_path_factory.mktemp("finished")
    with answering() as serving:
        settings = serving.settings | {"CKPT_SAVE_STEPS": "6"}
        with training(script(args=SCRIPT_SAVES, subclass=True), path / "volume", settings) as running:
            assert running.wait() == 0, running.log()
            yield running


def of_the_script(log: str) -> list[str]:
    """Return the lines of a script that do not tell the time."""
    return [line for line in log.splitlines() if not line.startswith(("[checkpoint]", "{"))]


def test_a_script_prints_and_computes_the_same_with_the_hook(finished_run: Training, unhooked: Callable[..., str]) -> None:
    assert of_the_script(finished_run.log()) == of_the_script(unhooked(args=SCRIPT_SAVES, subclass=True))


def test_its_own_directory_and_limit_stay_as_they_are(finished_run: Training) -> None:
    kept = sorted(path.name for path in (finished_run.work / "output").iterdir())
    assert kept == ["checkpoint-16", "checkpoint-20"]
    assert "limits False 2 output" in finished_run.log()
    assert finished(finished_run.volume) == ["final", "checkpoint-6", "checkpoint-12", "checkpoint-18", "checkpoint-20"]


@pytest.fixture
def again(finished_run: Training, tmp_path: Path, answers: Answers) -> Callable[..., Any]:
    """Start the same script once more on a copy of the finished run's volume."""

    def start(offered: str, **told: Any) -> Any:
        shutil.copytree(finished_run.volume, tmp_path / "again", ignore=shutil.ignore_patterns(".ckpt"))
        answers.by_call["POST /v1/resume"] = ready(offered)
        names = ["checkpoint-18", "checkpoint-12", "checkpoint-6"]
        known = [{"name": name, "step": int(name.split("-")[1])} for name in names]
        answers.by_call["GET /v1/checkpoints"] = (200, {"checkpoints": known})
        told = {"args": SCRIPT_SAVES, "subclass": True} | told
        return training(script(**told), tmp_path / "again", answers.settings | {"CKPT_SAVE_STEPS": "6"})

    return start


@pytest.mark.parametrize(("offered", "goes_on_at"), [("checkpoint-12", 17), ("checkpoint-18", 19)])
def test_the_further_of_the_scripts_path_and_ours_wins(
    offered: str, goes_on_at: int, again: Callable[..., Any], finished_run: Training
) -> None:
    with again(offered, resume=str(finished_run.work / "output/checkpoint-16")) as running:
        assert running.wait() == 0, running.log()
        assert running.steps()[0] == goes_on_at
        assert running.weights() == finished_run.weights()


@pytest.mark.parametrize("own", [None, "output/checkpoint-20"])
def test_a_finished_run_is_not_trained_a_step_further(
    own: str | None, again: Callable[..., Any], finished_run: Training
) -> None:
    """From its own checkpoint of the last step Trainer trains one more."""
    with again("checkpoint-20", resume=own and str(finished_run.work / own)) as running:
        assert running.wait() == 0, running.log()
        assert running.steps() == []
        assert "rank 0 call 0 ended at 20" in running.log()
        assert running.weights() == finished_run.weights()
        assert outcomes(running.log()) == outcomes(finished_run.log())
        assert trainer_state(running.volume)["state"] == "succeeded"
        assert marker(running.volume, "final")["step"] == 20


def test_an_incomplete_checkpoint_is_passed_over_in_favour_of_the_older(
    again: Callable[..., Any], finished_run: Training, tmp_path: Path
) -> None:
    with again("checkpoint-18") as running:
        (tmp_path / "again/checkpoint-18/optimizer.pt").unlink()
        assert running.wait() == 0, running.log()
        assert "WARNING (rank 0): " not in running.log()
        assert "checkpoint-18 is passed over: optimizer.pt missing or incomplete" in running.log()
        assert running.steps()[0] == 13
        assert running.weights() == finished_run.weights()


def test_a_script_may_keep_its_checkpoints_on_the_volume(tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", tmp_path / "store"
    arguments = SCRIPT_SAVES | {"output_dir": str(volume), "eval_strategy": "no", "max_steps": 12}
    told = script(args=arguments, sleep_s=0.25)
    with (
        pod(volume, store, {"CKPT_KEEP_LOCAL": "1"}) as (sidecar, found),
        training(told, volume, found | {"CKPT_SAVE_STEPS": "6"}) as running,
    ):
        assert running.wait() == 0, running.log()
        for step in (4, 6, 8, 12):
            sidecar.committed(f"checkpoint-{step}")
        until(lambda: not sidecar.status()["queue"])
        assert sidecar.status()["rejected"] == {}
        kept = [name for name in finished(volume) if name != "final"]
        owners = {name: marker(volume, name)["meta"].get("owner") for name in kept}
        assert owners["checkpoint-12"] == "script", "the newest is the script's and the sidecar leaves it"
        assert len(kept) <= 2, "the script's save_total_limit"
        assert re.findall(r"^script saved (\d+)$", running.log(), re.MULTILINE) == ["4", "8", "12"]
        assert "saved checkpoint-12" not in running.log(), "a step that the script saves itself is not saved twice"
        assert "published checkpoint-12, which the script saved" in running.log()


def test_two_train_calls_are_counted_on_and_each_resumes_where_it_was(tmp_path: Path, unhooked: Callable[..., str]) -> None:
    store, arguments = tmp_path / "store", {"max_steps": 10}
    settings = {"CKPT_SAVE_STEPS": "4"}
    volume = tmp_path / "volume"
    with (
        pod(volume, store) as (sidecar, found),
        training(script(args=arguments, calls=2, sleep_s=0.1), volume, found | settings) as first,
    ):
        first.said("rank 0 call 0 ended at 10")
        until(lambda: first.steps()[10:] and first.steps()[-1] == 6)
        assert first.terminate() == 143, first.log()
        jit = f"checkpoint-{10 + first.steps()[-1]}"
        sidecar.committed(jit)
        assert marker(volume, "checkpoint-14")["meta"] == {"train_call": 1, "base_step": 10}
        assert finished(volume)[-1] == jit
    with (
        pod(tmp_path / "empty", store) as (_, found),
        training(script(args=arguments, calls=2), tmp_path / "empty", found | settings) as second,
    ):
        assert second.wait() == 0, second.log()
        assert "training had finished at checkpoint-10" in second.log()
        assert f"resumes from {jit}" in second.log()
        assert second.steps() == list(range(first.steps()[-1] + 1, 11))
        assert f"weights {second.weights()}" in unhooked(args=arguments, calls=2)
        assert marker(tmp_path / "empty", "final")["step"] == 20


def test_the_second_train_of_a_trainer_has_its_optimizer_although_the_first_is_not_run_again(
    volume: Path, answers: Answers, unhooked: Callable[..., str]
) -> None:
    told = {"args": {"max_steps": 5}, "calls": 2, "same_trainer": True}
    with training(script(**told, sleep_s=0.3), volume, answers.settings) as first:
        first.said("rank 0 call 0 ended at 5")
        until(lambda: first.steps().count(2) == 2)
        first.process.kill()
        first.wait()
    assert finished(volume) == ["final", "checkpoint-5"]
    offer = ready("checkpoint-5", train_call=0, base_step=0)
    answers.by_call["POST /v1/resume"] = lambda asked: (
        (202, {"state": "none"}) if asked.get("train_call") == 1 else offer(asked)
    )
    with training(script(**told), volume, answers.settings) as second:
        assert second.wait() == 0, second.log()
        assert second.steps() == [1, 2, 3, 4, 5]
        alone = unhooked(**told)
        assert f"weights {second.weights()}" in alone
        assert outcomes(second.log()) == outcomes(alone), "also of the call that was not run again"


def test_a_train_after_a_resumed_one_keeps_its_optimizer(volume: Path, answers: Answers, unhooked: Callable[..., str]) -> None:
    """The third call took over the optimizer of the first, which had finished before the pod was lost."""
    told = {"args": {"max_steps": 5}, "calls": 3, "same_trainer": True}
    with training(script(**told, sleep_s=0.3), volume, answers.settings | {"CKPT_SAVE_STEPS": "7"}) as first:
        first.said("rank 0 call 0 ended at 5")
        until(lambda: first.steps().count(2) == 2)
        assert first.terminate() == 143, first.log()
    (resumed,) = set(finished(volume)) - {"final", "checkpoint-5"}
    offers = {1: ready(resumed, train_call=1, base_step=5)}
    other = ready("checkpoint-5", train_call=0, base_step=0)
    answers.by_call["POST /v1/resume"] = lambda asked: (
        (202, {"state": "none"}) if asked.get("train_call") == 2 else offers.get(asked.get("train_call"), other)(asked)
    )
    with training(script(**told), volume, answers.settings) as second:
        assert second.wait() == 0, second.log()
        assert f"weights {second.weights()}" in unhooked(**told)


def outcomes(log: str) -> list[str]:
    """Return what ``train()`` returned; without the one number that the library's printing takes out on its way."""
    return [line.replace("'total_flos', ", "") for line in re.findall(r"^rank 0 loss .*$", log, re.MULTILINE)]


@TRAINER_5
def test_the_librarys_own_jit_checkpoint_is_replaced_with_a_message(volume: Path, answers: Answers) -> None:
    told = script(args={"enable_jit_checkpoint": True, "max_steps": 100}, sleep_s=0.1)
    with training(told, volume, answers.settings) as running:
        running.at_step(3)
        assert running.terminate(timeout_s=20) == 143, running.log()
        assert running.log().count("enable_jit_checkpoint is replaced") == 1
        assert finished(volume) == [f"checkpoint-{running.steps()[-1]}"]
        assert not list((running.work / "output").glob("checkpoint-*"))
