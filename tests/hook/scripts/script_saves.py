"""Scripts that save by themselves and know nothing of the hook: ``script_saves.py WHAT``, with torchrun where WHAT says so."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_module

VOLUME = Path(os.environ["CKPT_DIR"])


class Slow(dcp.FileSystemWriter):
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(2.5)
        return super().write_data(*args, **kwargs)


def info(text: str) -> None:
    print(f"rank {dist.get_rank() if dist.is_initialized() else 0} {text}", flush=True)


def state() -> dict[str, Any]:
    return {"weights": torch.arange(4096.0), "place": {"rank": torch.ones(3)}}


def on_two_ranks() -> None:
    dist.init_process_group("gloo")
    dcp.save(state(), checkpoint_id=f"{VOLUME}/checkpoint-10")
    if dist.get_rank() == 1:
        time.sleep(0.3)
        (VOLUME / "checkpoint-10/extra.json").write_text("{}")
    for step in (20, 30):
        dcp.save(state(), checkpoint_id=VOLUME / f"global_step{step}")
        dcp.save(state(), checkpoint_id=VOLUME / f"checkpoint-{step}/model")
    dcp.save(state(), checkpoint_id=VOLUME.parent / "elsewhere/checkpoint-10")
    dist.barrier()
    while not (VOLUME / "checkpoint-10/.complete").exists():
        time.sleep(0.05)
    info("saw the marker")
    future: Any = dcp.async_save(state(), storage_writer=Slow(VOLUME / "checkpoint-40"))
    time.sleep(1.5)
    info(f"async_save done {future.done()} marked {(VOLUME / 'checkpoint-40/.complete').exists()}")
    future.result()
    if dist.get_rank() == 0:
        dcp.save(state(), checkpoint_id=VOLUME / "checkpoint-45", no_dist=True)
    dist.barrier()
    from trainer_hook.plain import save

    assert save(48, lambda folder: dcp.save(state(), checkpoint_id=folder))
    save_by_module(state(), storage_writer=dcp.FileSystemWriter(VOLUME / "checkpoint-50"))
    dist.destroy_process_group()


def by_a_process() -> None:
    dist.init_process_group("gloo")
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    future: Any = dcp.async_save(state(), checkpoint_id=VOLUME / "checkpoint-10", async_checkpointer_type=kind)
    future.result()
    dist.barrier()
    dist.destroy_process_group()


def alone() -> None:
    warnings.simplefilter("ignore")
    folder = VOLUME / "checkpoint-5"
    for number in (1, 2):
        dcp.save(state() | {"number": number}, checkpoint_id=folder)
        while not (folder / ".complete").exists():
            time.sleep(0.05)
        info(f"inode {next(folder.glob('*.distcp')).stat().st_ino}")
        os.link(next(folder.glob("*.distcp")), VOLUME / f"held-{number}")
    info("waits")
    time.sleep(60)


def fails_beside_a_save() -> None:
    warnings.simplefilter("ignore")
    dcp.async_save(state() | {"large": torch.ones(10_000_000)}, checkpoint_id=VOLUME / "checkpoint-9")
    raise ValueError("of the script")


def with_a_handler() -> None:
    def stop(*_: Any) -> None:
        (VOLUME / "checkpoint-7/late.json").write_text("{}")
        dcp.save(state(), checkpoint_id=VOLUME / "checkpoint-8")
        sys.exit(7)

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, stop)
    dcp.save(state(), checkpoint_id=VOLUME / "checkpoint-7")
    while not (VOLUME / "checkpoint-7/.complete").exists():
        time.sleep(0.05)
    info("waits")
    time.sleep(60)


def with_deepspeed() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in (1, 2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.save_checkpoint(str(VOLUME), tag=f"checkpoint-{step}")
    engine.save_checkpoint(str(VOLUME))
    dist.destroy_process_group()


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in (1, 2):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        if step == 2 or accelerator.is_main_process:  # both are usual in scripts
            accelerator.save_state(f"{VOLUME}/checkpoint-{step}")
            accelerator.save_state(f"{VOLUME}/runs/checkpoint-{step}")
        accelerator.wait_for_everyone()
    accelerator.save_state(VOLUME.parent / "elsewhere/checkpoint-3")
    accelerator.end_training()


def looks_for_its_checkpoint() -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True)
    info(f"sees {[path.name for path in VOLUME.glob('checkpoint-*')]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
