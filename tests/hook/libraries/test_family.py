"""Each trainer of TRL and transformers is preempted, loses its volume, and ends with the weights of an uninterrupted run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.volume.hook_install import install
from tests.forks import forks
from tests.hook.conftest import pod
from tests.hook.job import (
    PATIENCE_S,
    SCRIPTS,
    TRAINER_MODULES,
    Start,
    Training,
    finished,
    forked,
    marker,
    plain_environ,
    training,
)
from tests.process.sidecar_process import until

pytestmark = pytest.mark.slow
KINDS = ("lora", "dpo", "reward", "kto", "grpo", "rloo", "distillation", "seq2seq")
MODELS = ("llama.modeling_llama", "t5.modeling_t5")
SHIPPED = (
    "--output_dir output --max_steps 100 --per_device_train_batch_size 2 --learning_rate 1e-2 --max_length 32 --use_cpu "
    "--bf16 false --gradient_checkpointing false --save_strategy no --report_to none"
)


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    if lacking := [name for name in ("trl", "peft", "optuna") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    modules = (*TRAINER_MODULES, "peft", "optuna", *(f"transformers.models.{name}" for name in MODELS))
    with forks(*modules, environ=plain_environ()) as warm:
        yield forked(warm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_is_preempted_ends_as_if_it_was_not(kind: str, start: Start, tmp_path: Path) -> None:
    command, store, volume, empty = script("family.py", kind), tmp_path / "store", tmp_path / "volume", tmp_path / "empty"
    with pod(volume, store) as (sidecar, found), training([*command, "0.2"], volume, found, start=start) as first:
        first.at_step(3)
        assert first.terminate() == 143, first.log()
        stopped_at = first.steps()[-1]
        sidecar.committed(f"checkpoint-{stopped_at}")
        assert sidecar.terminate() == 0
    with training([*command, "0"], tmp_path / "alone", hooked=False, start=start) as alone:
        assert alone.wait() == 0, alone.log()
    with pod(empty, store) as (_, found), training([*command, "0"], empty, found, start=start) as second:
        assert second.wait() == 0, second.log()
    assert second.steps() == list(range(stopped_at + 1, 11)), "the rest, and no step twice"
    assert second.weights() == alone.weights()
    assert "WARNING" not in told(first) + told(second)
    assert "not bit-identical" not in second.log()
    saved = {file["path"] for file in marker(volume, f"checkpoint-{stopped_at}")["files"]}
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    assert {weights, "optimizer.pt", "tokenizer.json"} <= saved


def test_a_search_is_left_alone_and_the_training_after_it_resumes(start: Start, tmp_path: Path) -> None:
    command, store, volume, empty = script("search.py"), tmp_path / "store", tmp_path / "volume", tmp_path / "empty"
    with pod(volume, store) as (sidecar, found):
        with training([*command, "0.2"], volume, found, start=start) as searching:
            searching.said("trial 1\n")
            assert searching.terminate() == 143, searching.log()
            assert finished(volume) == [], "a trial is not one run"
        with training([*command, "0.1"], volume, found, start=start) as first:
            first.said("best ")
            until(lambda: 3 < first.steps()[-1] < 10 and first.steps().count(3) == 4)
            assert first.terminate() == 143, first.log()
            stopped_at = first.steps()[-1]
            sidecar.committed(f"checkpoint-{stopped_at}")
            assert sidecar.terminate() == 0
    with training([*command, "0"], tmp_path / "alone", hooked=False, start=start) as alone:
        assert alone.wait() == 0, alone.log()
    with pod(empty, store) as (_, found), training([*command, "0"], empty, found, start=start) as second:
        assert second.wait() == 0, second.log()
    assert second.steps() == [*alone.steps()[:-10], *range(stopped_at + 1, 11)]
    assert second.log().count("hyperparameter search: its trials are left alone") == 1
    assert (best(second), second.weights()) == (best(alone), alone.weights())


def test_a_script_that_trl_ships_is_preempted_and_resumes_unmodified(start: Start, tmp_path: Path) -> None:
    model, rows, store, empty = tmp_path / "model", tmp_path / "rows", tmp_path / "store", tmp_path / "empty"
    with training(script("tiny.py", str(model), str(rows)), tmp_path / "made", hooked=False, start=start) as making:
        assert making.wait() == 0, making.log()
    shipped = str(importlib.metadata.distribution("trl").locate_file("trl/scripts/sft.py"))
    command = [sys.executable, shipped, "--model_name_or_path", str(model), "--dataset_name", str(rows), *SHIPPED.split()]
    alone_settings = {"HF_HOME": str(tmp_path / "cache")}
    hook = alone_settings | {"CKPT_HOOK": "auto", "PYTHONPATH": str(install(tmp_path / "hook").folder), "CKPT_SAVE_STEPS": "20"}
    with (
        pod(tmp_path / "volume", store) as (sidecar, found),
        training(command, tmp_path / "volume", hook | found, hooked=False) as first,
    ):
        first.said("saved checkpoint-20 (periodic", timeout_s=2 * PATIENCE_S)
        assert first.terminate() == 143, first.log()
        jit = finished(first.volume)[-1]
        assert marker(first.volume, jit)["reason"] == "jit"
        sidecar.committed(jit)
    with training(command, tmp_path / "alone", alone_settings, hooked=False, start=start) as alone:
        assert alone.wait() == 0, alone.log()
    with (
        pod(empty, store) as (_, found),
        training(command, empty, hook | found, hooked=False, start=start) as second,
    ):
        assert second.wait() == 0, second.log()
    # Or downloaded before the script asked: the sidecar begins at once.
    assert re.search(rf"resumes from {jit} \((downloaded )?from the store", second.log()), second.log()[-3000:]
    assert "everything is durable" in second.log()
    trained = [(run.work / "output/model.safetensors").read_bytes() for run in (alone, second)]
    assert trained[0] == trained[1]


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *arguments]


def told(run: Training) -> str:
    """Return what the hook said."""
    return "\n".join(line for line in run.log().splitlines() if line.startswith("[checkpoint]"))


def best(run: Training) -> list[str]:
    return re.findall("^best .*$", run.log(), re.MULTILINE)
