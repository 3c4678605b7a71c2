"""What the API says. Every field has its unit in its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sidecar.core import layout
from sidecar.settings import amount_bytes


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Watching the volume, and the store is reachable."""

    status: Literal["ready"] = "ready"
    verification: str


class Trainer(BaseModel):
    """What is known of the trainer."""

    alive: bool = Field(description="A rank's lease is held")
    ranks: int = Field(description="Leases held")
    state: str | None = Field(None, description="running, preempted, succeeded or failed; null without a hook")
    step: int | None = None
    updated_at: str | None = None


class Termination(BaseModel):
    """The pod is going."""

    source: str
    at: str
    grace_seconds: float
    deadline_in_s: float


class AtRisk(BaseModel):
    """What a kill at this instant would cost, and how long a just-in-time save takes; null where it is not known yet."""

    seconds_at_risk: float | None
    steps_at_risk: int | None
    predicted_save_s: float | None = Field(description="From SIGTERM until the trainer has written a checkpoint")
    predicted_flush_s: float | None = Field(description="Until its bytes are in the store at the measured rate")
    predicted_durable_s: float | None = Field(description="Both together, to be compared with the grace period")
    fits_grace: bool | None
    advice: str | None = Field(description="What to change where it does not fit")


class StoreStatus(BaseModel):
    """The object store."""

    url: str
    reached: bool
    verification: str | None = Field(None, description="How uploads are verified: store-crc, md5, read-back, fsync or off")
    conditional_put: bool | None = None


class Transfer(BaseModel):
    """A checkpoint on its way to the store, or waiting for its turn."""

    checkpoint: str
    state: str
    sent_bytes: int
    size_bytes: int
    reason: str | None = None


class Planned(BaseModel):
    """What is expected of a checkpoint in the time that is left."""

    checkpoint: str
    verdict: Literal["fits", "may-fit", "no-time"]
    left_bytes: int
    predicted_s: float | None = Field(description="Until it is durable; null before any rate was measured")
    reason: str | None = Field(None, description="Why it is not expected to be durable by the deadline")


class Volume(BaseModel):
    """The shared volume."""

    free_bytes: int | None = Field(description="null while the volume cannot be read")
    total_bytes: int | None


class Status(BaseModel):
    """Everything at one glance."""

    version: str
    phase: str
    degraded: bool = Field(description="The store cannot be used at the moment; training goes on")
    degraded_reason: str | None = None
    store: StoreStatus
    trainer: Trainer
    termination: Termination | None = None
    newest_durable_step: int | None = None
    newest_finished_step: int | None = None
    queue: list[Transfer] = Field(description="What is not durable yet, in the order in which it will be")
    flush: list[Planned] | None = Field(None, description="While the pod is going: the plan, in the order of sending")
    given_up: dict[str, str] = Field(description="What was finished and will not be durable, and why")
    at_risk: AtRisk
    bandwidth_limit_bytes_per_s: int | None
    concurrency: int = Field(description="Large requests at once, adapted to what is fast")
    throughput_bytes_per_s: float | None = None
    sent_bytes: int = Field(description="Since the sidecar started")
    retries: int
    volume: Volume
    rejected: dict[str, str] = Field(description="Local directories that are not valid checkpoints, and why")
    quarantined: dict[str, str] = Field(description="Committed checkpoints that failed verification, and why")


class Checkpoint(BaseModel):
    """One checkpoint, on the volume, in the store or both."""

    name: str
    step: int | None = None
    state: str
    reason: str | None = Field(None, description="Why it is in this state")
    save_reason: str | None = Field(None, description="periodic, jit, manual or final")
    attempt: str | None = None
    node_index: int | None = None
    node_count: int | None = None
    created_at: str | None = None
    committed_at: str | None = None
    files: int | None = None
    size_bytes: int | None = None
    sent_bytes: int | None = None
    on_volume: bool
    in_store: bool


class Checkpoints(BaseModel):
    """All known checkpoints, newest first."""

    checkpoints: list[Checkpoint]


class Share(_Request):
    """The training processes of a node, where each of them reads its own files and the shared ones, and no others."""

    world_size: int = Field(ge=1, description="Training processes of the job")
    ranks: frozenset[int] = Field(min_length=1, description="Those of this node, each below world_size")

    @model_validator(mode="after")
    def _exists(self) -> Share:
        self.core()
        return self

    def core(self) -> layout.Share:
        """Return what the rules work with."""
        return layout.Share(self.world_size, self.ranks)


class ResumeRequest(_Request):
    """What to continue from."""

    checkpoint: str = Field("latest", description="latest, checkpoint-<step> or final")
    train_call: int | None = Field(None, ge=0, description="Only checkpoints of this train() call of the script, from 0 on")
    share: Share | None = Field(None, description="Leave out what only ranks of other nodes read; absent: every file")


class PassedOver(BaseModel):
    """A checkpoint that was not used."""

    checkpoint: str
    reason: str


class Resume(BaseModel):
    """How far a resume is."""

    state: Literal["idle", "choosing", "downloading", "ready", "none", "failed"]
    requested: str | None = None
    train_call: int | None = None
    share: Share | None = None
    checkpoint: str | None = None
    step: int | None = None
    path: str | None = Field(None, description="As the sidecar sees the volume")
    source: Literal["local", "store"] | None = None
    meta: dict[str, Any] = {}
    done_bytes: int
    total_bytes: int
    passed_over: list[PassedOver]
    detail: str | None = None


class FlushRequest(_Request):
    """How long to wait."""

    timeout_s: float = Field(30.0, ge=0, le=3600)


class Flushed(BaseModel):
    """All that is finished is durable."""

    durable: list[str]


class BandwidthRequest(_Request):
    """How fast uploads may be from now on."""

    limit: Annotated[int, BeforeValidator(amount_bytes), Field(gt=0)] | None = Field(
        None, description="Bytes per second of all uploads together, such as 200MB/s; null: no limit"
    )


class Bandwidth(BaseModel):
    """How fast uploads may be."""

    limit_bytes_per_s: int | None


class RoomRequest(_Request):
    """What the next checkpoint needs."""

    bytes: Annotated[int, BeforeValidator(amount_bytes), Field(ge=0)] = Field(description="Such as 20GB")


class Room(BaseModel):
    """What is free now."""

    free_bytes: int
    deleted: list[str] = Field(description="Checkpoints that left the volume; all of them are durable")


class SaveRequest(_Request):
    """What to ask of the trainer."""

    stop: bool = Field(False, description="End training after the save")


class Saving(BaseModel):
    """A save that was asked for."""

    id: str
    action: str
    state: Literal["asked", "saved", "durable", "failed"] = Field(
        description="asked: not answered yet; saved: on its way to the store"
    )
    checkpoint: str | None = None
    detail: str | None = Field(None, description="What is waited for, or why it failed")
    sent_bytes: int | None = None
    size_bytes: int | None = None


class Draining(BaseModel):
    """Termination has begun."""

    phase: str
    deadline_in_s: float
