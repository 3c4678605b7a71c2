"""Cost of the hook for a training script: per step, per import, per interpreter. ``python -m benchmarks.hook_overhead``.

Steps of a tiny model are timed in one process, alternately with and without the hook; the difference of the medians is the
cost of the hook. Its schedule, signals, requests, state file and evaluation guard are all on. No checkpoint is saved meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INJECT = ROOT / "trainer_hook/activation/inject"
IMPORTS = ("pass", "import torch", "from transformers import Trainer")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps per round and side")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(steps_ms(rounds=options.rounds, steps=options.steps)))
        return
    measured = {"step": in_a_process(options.rounds, options.steps), "interpreter": imports_ms(options.rounds)}
    print(json.dumps(measured) if options.json else as_text(measured))


def in_a_process(rounds: int, steps: int) -> Any:
    """Time steps in a process of their own, hooked as a script would be."""
    with tempfile.TemporaryDirectory() as volume:
        environ = hooked(volume) | {"CKPT_RESUME_TIMEOUT_S": "1", "CKPT_SAVE_MINUTES": "600", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.hook_overhead", "--inside", f"--rounds={rounds}", f"--steps={steps}"]
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def hooked(volume: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(INJECT), "CKPT_HOOK": "auto", "CKPT_DIR": volume}


def steps_ms(*, rounds: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each side, and of their differences, round by round."""
    import torch
    from transformers import Trainer

    from trainer_hook.process.session import current_session

    torch.set_num_threads(1)
    sides = {"hooked": Trainer.train, "plain": Trainer.train.__wrapped__}
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, train in sides.items():
            took[name].append(_one_run_ms(train, steps))
    own_us = own_cpu_us()
    current_session().outcome = None  # else the end waits for a sidecar
    difference = [a - b for a, b in zip(took["hooked"], took["plain"], strict=True)]
    medians = {name: statistics.median(times) for name, times in took.items()}
    spread = {"difference": statistics.median(difference), "least": min(difference), "most": max(difference)}
    return medians | spread | {"own_cpu_us": own_us}


def own_cpu_us(rounds: int = 30, steps: int = 1000) -> float:
    """Return the microseconds of CPU that the hook itself takes for a step at which nothing is due: the least of the rounds."""
    from types import SimpleNamespace

    from trainer_hook.libraries.transformers.callback import callback_class
    from trainer_hook.libraries.transformers.driver import TrainerDriver
    from trainer_hook.libraries.transformers.script_saves import ScriptSaves
    from trainer_hook.process.patching import surrounded
    from trainer_hook.process.session import current_session
    from trainer_hook.train_call.train_call import TrainCall

    flags = ("should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
    control = SimpleNamespace(**dict.fromkeys(flags, False))
    state = SimpleNamespace(epoch=0.5, global_step=1, max_steps=10**9)
    trainer = SimpleNamespace(control=control, state=state, args=SimpleNamespace(world_size=1), step_tail=lambda: None)
    driver = TrainerDriver(current_session(), trainer, None)
    call = TrainCall(current_session(), driver)
    hook = callback_class()(call, driver, ScriptSaves(call, driver), lambda: None)
    took = []
    with surrounded(trainer, "step_tail", during=driver.tail.doing, after=hook.save_what_is_due):
        for _ in range(rounds):
            began_s = time.thread_time()
            for _ in range(steps):
                state.global_step += 1
                hook.on_step_begin(None, state, control)
                hook.on_step_end(None, state, control)
                trainer.step_tail()
            took.append(1e6 * (time.thread_time() - began_s) / steps)
    return min(took)


def _one_run_ms(train: Any, steps: int) -> float:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.at_s: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.at_s.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output, max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            per_device_train_batch_size=1, logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        rows = [{"x": torch.ones(4)}] * steps
        train(Trainer(model=Net(), args=arguments, train_dataset=rows, callbacks=[clock]))
    times = [1000 * (b - a) for a, b in zip(clock.at_s, clock.at_s[1:], strict=False)]
    return statistics.median(times)


def imports_ms(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of an interpreter's whole life: without the hook, with it off, with it on."""
    with tempfile.TemporaryDirectory() as volume:
        on = hooked(volume)
        sides = {"bare": dict(os.environ), "off": on | {"CKPT_HOOK": ""}, "on": on}
        return {
            code: {name: statistics.median(_life_ms(code, environ) for _ in range(rounds)) for name, environ in sides.items()}
            for code in IMPORTS
        }


def _life_ms(code: str, environ: dict[str, str]) -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environ, stderr=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - began_s)


def as_text(measured: dict[str, Any]) -> str:
    step = measured["step"]
    lines = [
        f"the hook's own work: {step['own_cpu_us']:.1f} us of CPU per step",
        f"a step: {step['plain']:.3f} ms, with the hook {step['hooked']:.3f} ms",
        f"the hook: {step['difference']:+.3f} ms per step (rounds: {step['least']:+.3f} to {step['most']:+.3f})",
    ]
    for code, took in measured["interpreter"].items():
        lines.append(
            f"python -c '{code}': {took['bare']:.0f} ms, injected but off {took['off']:.0f} ms, on {took['on']:.0f} ms"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
