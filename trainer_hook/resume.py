"""Where a run continues: asks the sidecar, checks that nothing is missing, and sees that all ranks do the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook.agreement import Agreement
from trainer_hook.client import Answer, Client, SidecarAbsent
from trainer_hook.contract import META_TRAIN_CALL, step_of
from trainer_hook.log import say, warn
from trainer_hook.publish import finished_on
from trainer_hook.settings import Settings

STATE = "trainer_state.json"
_WEIGHTS = ("model", "pytorch_model", "adapter_model", "tf_model", "flax_model")


class CannotResume(SystemExit):
    """``CKPT_ON_STORE_FAILURE=fail``, and it is not known what to resume from."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A directory on the volume that is complete for this trainer."""

    name: str
    path: Path
    base_step: int


def missing_from(files: Iterable[str], *, rank: int, world_size: int) -> list[str]:
    """Return what a Trainer checkpoint lacks for one rank.

    Trainer itself loads what it finds: without ``optimizer.pt`` or ``scheduler.pt`` it silently drops both, without the RNG
    state it goes on with another.
    """
    names = set(files)
    tops = {name.split("/", 1)[0] for name in names}
    sharded = any(top.startswith("global_step") for top in tops)  # DeepSpeed keeps weights and optimizer there
    missing = [] if STATE in names else [STATE]
    if not sharded and not any(name.startswith(_WEIGHTS) for name in tops):
        missing.append("the model's weights")
    if not sharded and not any(top.startswith("optimizer") for top in tops):
        missing.append("optimizer.pt")
    if "scheduler.pt" not in names and not sharded:
        missing.append("scheduler.pt")
    rng = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    if rng not in names:
        missing.append(rng)
    return missing


def is_finished(state: dict[str, Any], *, max_steps: int, epochs: float) -> bool:
    """Whether a run that stood at ``state`` has nothing left to train. Trainer itself would train one step too many.

    Args:
        state: Content of ``trainer_state.json``.
        max_steps: The run's own limit; 0 or less means that ``epochs`` limits it.
        epochs: ``num_train_epochs``.
    """
    if max_steps > 0:
        return bool(state.get("global_step", 0) >= max_steps)
    return bool((state.get("epoch") or 0.0) >= math.floor(epochs * 1e6) / 1e6 - 1e-6)


def read_state(folder: Path) -> dict[str, Any]:
    """Return ``trainer_state.json`` of a checkpoint, or an empty one."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


class Resumer:
    """One question per ``train()`` call; collective."""

    def __init__(self, settings: Settings, client: Client, agreement: Agreement) -> None:
        self._settings = settings
        self._client = client
        self._agreement = agreement
        self._volume = settings.dir

    def choose(self, train_call: int) -> Choice | None:
        """Return what all ranks continue from, or ``None`` for a fresh start.

        Raises:
            CannotResume: It is not known what to continue from, and the settings ask to fail then.
        """
        answer = self._agreement.from_rank_0(self._ask(train_call) if self._agreement.world.rank == 0 else None)
        while answer.checkpoint is not None:
            reason = self._problem(answer.checkpoint)
            if self._agreement.all_agree(reason is None):
                return Choice(answer.checkpoint, self._volume / answer.checkpoint, int(answer.meta.get("base_step", 0)))
            if reason is not None:
                warn(f"{answer.checkpoint} is passed over: {reason}")
            answer = self._agreement.from_rank_0(
                self._ask_older(answer, train_call) if self._agreement.world.rank == 0 else None
            )
        if not answer.known and self._settings.fail_without_store:
            warn(f"exits 1 because CKPT_ON_STORE_FAILURE=fail: {answer.detail}")
            raise CannotResume(1)
        return None

    def _ask(self, train_call: int) -> Answer:
        try:
            answer = self._client.resume("latest", train_call=train_call, timeout_s=self._settings.resume_timeout_s, tell=say)
        except SidecarAbsent as absent:
            return self._local(train_call, str(absent))
        for name, reason in answer.passed_over:
            warn(f"{name} is passed over: {reason}")
        if answer.checkpoint is None and not answer.known:
            warn(f"no checkpoint can be had: {answer.detail}")
            return self._local(train_call, str(answer.detail))
        return answer

    def _ask_older(self, refused: Answer, train_call: int) -> Answer:
        step = step_of(refused.checkpoint or "") or 0
        try:
            for name in self._client.older_checkpoints(step):
                answer = self._client.resume(name, train_call=train_call, timeout_s=self._settings.resume_timeout_s, tell=say)
                if answer.checkpoint is not None:
                    return answer
        except (SidecarAbsent, OSError) as error:
            return Answer(detail=str(error), known=False)
        return Answer()

    def _local(self, train_call: int, why: str) -> Answer:
        usable = [
            c
            for c in finished_on(self._volume)
            if step_of(c.name) is not None
            and (c.marker.node is None or c.marker.node.count == 1)
            and c.marker.meta.get(META_TRAIN_CALL, 0) == train_call
        ]
        if not usable or self._settings.fail_without_store:
            return Answer(detail=why, known=False)
        newest = max(usable, key=lambda c: step_of(c.name) or 0)
        warn(f"{why}; continues from {newest.name}, the newest on the volume")
        return Answer(newest.name, "local", dict(newest.marker.meta), known=False)

    def _problem(self, name: str) -> str | None:
        """Return why this rank cannot use the checkpoint. Fetches it first on nodes that did not ask for it."""
        world = self._agreement.world
        if world.local_rank == 0 and world.rank != 0:
            try:
                fetched = self._client.resume(name, train_call=None, timeout_s=self._settings.resume_timeout_s, tell=say)
            except SidecarAbsent as absent:
                return str(absent)
            if fetched.checkpoint is None:
                return fetched.detail or "; ".join(reason for _, reason in fetched.passed_over) or "not to be had on this node"
        self._agreement.all_agree(True)  # the other ranks of this node wait for its directory
        folder = self._volume / name
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        missing = missing_from(files, rank=world.rank, world_size=world.size)
        return f"{', '.join(missing)} missing: it cannot be resumed exactly" if missing else None


def step_in_call(choice: Choice) -> int:
    """Return the Trainer's own step of a choice."""
    return (step_of(choice.name) or 0) - choice.base_step
