"""Trains a model of a given size with the Hugging Face Trainer and reports how long each save held the training thread.

python -m benchmarks.stall_trainer MODE GB SAVES STEPS_BETWEEN FOLDER

``blocking`` and ``ours`` are saves of the hook, which the environment activates; ``dcp-thread`` and ``dcp-process`` are
``torch.distributed.checkpoint.async_save`` with a stager that is used again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

WIDTH = 2048
ROWS = 64
STATE_COPIES = 3
"""Parameters and the two moments of Adam."""
IS_CUDA = torch.cuda.is_available()


class Net(torch.nn.Module):
    """Layers of 16 MiB each."""

    def __init__(self, size_bytes: float) -> None:
        super().__init__()
        count = max(1, round(size_bytes / STATE_COPIES / (4 * WIDTH * WIDTH)))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x).relu() / len(self.layers)
        return {"loss": (x.mean(-1) - labels).square().mean()}


class Rows(torch.utils.data.Dataset[Any]):
    """Random rows, the same ones in every run."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": row.mean()}


class Watch(TrainerCallback):
    """Records the end of each step, and how long the training thread was held in it."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.held_s: dict[int, float] = {}
        self.early: list[int] = []
        """Steps of saves that began before the save before them was written: they waited for it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if IS_CUDA:
            torch.cuda.synchronize()
        self.ends_s.append(time.monotonic())

    def holding(self, function: Any) -> Any:
        """Wrap the calls that hold the training thread."""

        def held(*args: Any, **kwargs: Any) -> Any:
            began_s, step = time.monotonic(), len(self.ends_s)
            try:
                return function(*args, **kwargs)
            finally:
                self.held_s[step] = self.held_s.get(step, 0.0) + time.monotonic() - began_s

        return held


class Dcp(TrainerCallback):
    """Saves with ``async_save``."""

    def __init__(self, mode: str, every: int, folder: Path, watch: Watch) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._every, self._folder, self._process = every, folder, mode == "dcp-process"
        self._stager = DefaultStager(StagingOptions(IS_CUDA, self._process, IS_CUDA, IS_CUDA))
        # torch 2.11 closes it after each use, and the next one fails. As in later versions, it keeps its pinned memory.
        self._stager._state_dict_stager.close = lambda: None
        self._response: Any = None
        self._watch = watch
        self._save_held, self._staged_held = watch.holding(self._save), watch.holding(self._wait_until_staged)
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self._save_held(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._staged_held()  # the parameters must not change before

    def _wait_until_staged(self) -> None:
        staged = getattr(self._response, "staging_completion", None)
        if staged is not None:
            staged.result()

    def _wait(self) -> None:
        if self._response is not None:
            self._written().result()

    def _written(self) -> Any:
        return getattr(self._response, "upload_completion", self._response)

    def _save(self, step: int) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not dist.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            dist.init_process_group("gloo", store=dist.FileStore(str(self._folder / "store"), 1), rank=0, world_size=1)
        if self._response is not None and not self._written().done():
            self._watch.early.append(step)
        self._wait()
        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        # Plain dictionaries: the stager of torch 2.11 cannot copy others.
        optimizer = self.trainer.optimizer
        state = {
            "model": dict(self.trainer.model.state_dict()),
            "optimizer": dict(getattr(optimizer, "optimizer", optimizer).state_dict()),
        }
        self._response = dcp.async_save(
            state, checkpoint_id=str(self._folder / "dcp"), async_checkpointer_type=kind, async_stager=self._stager
        )


def watch_the_hook(watch: Watch, volume: Path) -> None:
    """Time the hook in the training thread: its saves, and the waits of the optimizer's step."""
    from trainer_hook.asynchronous import snapshot
    from trainer_hook.saving.step_saver import StepSaver

    save_held = watch.holding(StepSaver.save)

    def save(saver: StepSaver, step: int, *args: Any, **kwargs: Any) -> bool:
        if any(not (written / ".complete").exists() for written in volume.glob("checkpoint-*")):
            watch.early.append(step)
        return bool(save_held(saver, step, *args, **kwargs))

    # For the whole process: a trainer makes its saver itself.
    StepSaver.save = save  # type: ignore[method-assign, assignment]
    before = snapshot.before_next_step
    snapshot.before_next_step = lambda optimizer, act: before(optimizer, watch.holding(act))


def main(mode: str, size_gb: float, saves: int, every: int, folder: Path) -> None:
    """Train, and print the measurements as one line of JSON."""
    set_seed(1)
    watch = Watch()
    net = Net(size_gb * 1e9)
    arguments = TrainingArguments(
        output_dir="output",  # part of what is saved: the same in every run
        max_steps=saves * every + every - 1,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not IS_CUDA,
        max_grad_norm=0,
        learning_rate=1e-6,
        logging_strategy="no",
    )
    peer = Dcp(mode, every, folder, watch) if mode.startswith("dcp") else None
    trainer = Trainer(model=net, args=arguments, train_dataset=Rows(), callbacks=[watch, *filter(None, [peer])])
    if peer is None:
        watch_the_hook(watch, folder / "volume")
    else:
        peer.trainer = trainer
    trainer.train()
    between_s = [later - earlier for earlier, later in zip(watch.ends_s, watch.ends_s[1:], strict=False)]
    parameters = sum(parameter.nbytes for parameter in net.parameters())
    device = torch.cuda.get_device_name() if IS_CUDA else "cpu"
    told = {
        "held_s": watch.held_s,
        "steps_s": between_s,
        "early": watch.early,
        "state_bytes": parameters * STATE_COPIES,
        "device": device,
    }
    print(json.dumps(told), flush=True)
    os._exit(0)  # nobody waits for a sidecar here


if __name__ == "__main__":
    _, which, gb, save_count, step_count, where = sys.argv
    main(which, float(gb), int(save_count), int(step_count), Path(where))
