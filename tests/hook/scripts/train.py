"""A training script that knows nothing of checkpoints. What it does is told as one JSON argument."""

import hashlib
import json
import os
import sys
import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

TOLD = {
    "args": {},
    "sleep_s": 0.0,
    "eval_sleep_s": 0.0,
    "rank_1_sleep_s": 0.0,
    "before_s": 0.0,
    "resume": None,
    "calls": 1,
    "subclass": False,
    "averages": False,
    "epoch_draws": False,
    "quiet": False,
    "width": 16,
    "eval_draws": False,
    "same_trainer": False,
    "rows": 64,
    "fsdp": False,
    "save_model": None,
    "own_loader": None,
    "stream": False,
    "ends_epoch_at": None,
}
TOLD |= json.loads(sys.argv[1])
RANK = os.environ.get("RANK", "0")


def tell(text):
    os.write(1, f"{text}\n".encode())  # in one piece, because ranks share the stream


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return TOLD["rows"]

    def __getitem__(self, index):
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": (row.sum() > 0).long()}


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length, in another order in each pass, or in the same."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = 0 if TOLD["stream"] == "same" else epoch

    def __iter__(self):
        return (Rows()[(row * (2 * self.epoch + 1)) % TOLD["rows"]] for row in range(TOLD["rows"]))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        width = TOLD["width"]
        self.body = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 2))

    def forward(self, x, labels):
        if not self.training:
            time.sleep(TOLD["eval_sleep_s"])
            if TOLD["eval_draws"]:  # as a generation that samples does
                torch.rand(3)
        logits = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class TellsSteps(TrainerCallback):
    """The script's own callback, one that does nothing between two steps."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        if TOLD["epoch_draws"]:
            torch.rand(1)

    def on_step_end(self, args, state, control, **kwargs):
        tell(f"rank {RANK} step {state.global_step}")
        control.should_epoch_stop |= state.global_step == TOLD["ends_epoch_at"]
        time.sleep(TOLD["sleep_s"] + (TOLD["rank_1_sleep_s"] if RANK == "1" else 0))


class Tells(TellsSteps):
    """The script's own callback."""

    def on_evaluate(self, args, state, control, **kwargs):
        tell(f"evaluated {state.global_step}")

    def on_prediction_step(self, args, state, control, **kwargs):
        tell("prediction step")

    def on_save(self, args, state, control, **kwargs):
        tell(f"script saved {state.global_step}")


class Own(Trainer):
    """A subclass whose constructor has another shape."""

    def __init__(self, net, rows, arguments):
        super().__init__(model=net, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Tells()])


class Averages(Trainer):
    """A subclass that evaluates with other weights than those that it trains."""

    def evaluate(self, *args, **kwargs):
        trained = [parameter.detach().clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data.mul_(0.5)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            for parameter, value in zip(self.model.parameters(), trained, strict=True):
                parameter.data.copy_(value)


class Batches:
    """A batch sampler that shuffles by its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return TOLD["rows"] // 4

    def __iter__(self):
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return ([4 * batch + row for row in range(4)] for batch in order)


class OwnLoader(Trainer):
    """A subclass whose loader shuffles with a generator of its own, with the global one, or by a batch sampler."""

    def get_train_dataloader(self):
        if TOLD["own_loader"] == "batches":
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=Batches())
        own = torch.Generator().manual_seed(5) if TOLD["own_loader"] == "generator" else None
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=True, generator=own)


def trainer_of(net, arguments):
    if TOLD["own_loader"]:
        return OwnLoader(model=net, args=arguments, train_dataset=Rows(), callbacks=[TellsSteps()])
    if TOLD["subclass"]:
        return Own(net, Rows(), arguments)
    tells = TellsSteps() if TOLD["quiet"] else Tells()
    rows = Stream() if TOLD["stream"] else Rows()
    return (Averages if TOLD["averages"] else Trainer)(
        model=net, args=arguments, train_dataset=rows, eval_dataset=Rows(), callbacks=[tells]
    )


def shard_on_cpus():
    """accelerate itself shards on CPUs as well as elsewhere, and only declines to be asked."""
    from accelerate.state import AcceleratorState, DistributedType

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP

    AcceleratorState.__init__ = init
    return {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def main():
    torch.set_num_threads(1)
    set_seed(3)
    net = Net()
    defaults = {"output_dir": "output", "max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 5}
    sharded = shard_on_cpus() if TOLD["fsdp"] else {}
    arguments = TrainingArguments(**(defaults | quiet | sharded | TOLD["args"]))
    tell("made")
    time.sleep(TOLD["before_s"])
    trainer = None
    for call in range(TOLD["calls"]):
        trainer = trainer if trainer and TOLD["same_trainer"] else trainer_of(net, arguments)
        outcome = trainer.train(resume_from_checkpoint=TOLD["resume"])
        tell(f"rank {RANK} call {call} ended at {outcome.global_step}")
        tell(f"rank {RANK} loss {outcome.training_loss} of {sorted(outcome.metrics)}")
    if TOLD["save_model"]:
        trainer.save_model(TOLD["save_model"])
    tell(f"limits {trainer.args.save_only_model} {trainer.args.save_total_limit} {trainer.args.output_dir}")
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        whole = tensor.full_tensor() if TOLD["fsdp"] else tensor
        digest.update(name.encode() + whole.numpy().tobytes())
    if RANK == "0":
        tell(f"weights {digest.hexdigest()}")
        tell(f"draws {torch.rand(1).item()}")
        if not TOLD["fsdp"]:
            moments = sum(float(each["exp_avg_sq"].sum()) for each in trainer.optimizer.state_dict()["state"].values())
            tell(f"optimizer {moments}, rates {trainer.lr_scheduler.get_last_lr()}")


if __name__ == "__main__":
    main()
