"""Models of the API. Every field has its unit in its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sidecar.core.format import rank_layout
from sidecar.daemon.settings import Bytes


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):  # Python counts true as 1
        raise ValueError("must be a number, not true or false")
    return value


_Number = BeforeValidator(_no_truth_value)


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The volume is watched, and the store is usable."""

    status: Literal["ready"] = "ready"
    verification: str


class Trainer(BaseModel):
    """State of the trainer."""

    alive: bool = Field(description="A rank's lease is held")
    ranks: int = Field(description="Leases held")
    state: str | None = Field(None, description="running, preempted, succeeded or failed; null without a hook")
    step: int | None = None
    updated_at: str | None = None
    world_size: int | None = Field(None, description="Training processes of the job")
    total_steps: int | None = Field(None, description="Planned steps; null: the hook does not know them")
    loss: float | None = Field(None, description="As the training library logged it last")
    save_error: str | None = Field(None, description="Why its latest save failed; null: it did not")


class Termination(BaseModel):
    """A termination notice."""

    source: str
    at: str
    grace_seconds: float
    deadline_in_s: float


class AtRisk(BaseModel):
    """Cost of a kill at this instant, and duration of a just-in-time save; null: not known yet."""

    seconds_at_risk: float | None = Field(description="Training time since the newest durable state was saved")
    steps_at_risk: int | None
    store: Literal["answers", "unknown", "silent", "away", "refuses", "full"] = Field(
        description="unknown: the latest answer is older than the grace period, or a request is late"
    )
    grows: bool = Field(True, description="Training runs, or is assumed to because there is no hook")
    predicted_save_s: float | None = Field(description="From SIGTERM until the trainer has written a checkpoint")
    predicted_flush_s: float | None = Field(
        description="Duration of its upload at the measured rate; null unless the store answers"
    )
    predicted_durable_s: float | None = Field(description="Sum of both, to be compared with the grace period")
    upload_bytes_per_s: float | None = Field(description="The measured rate of an upload")
    fits_grace: bool | None = Field(description="false also while the store cannot be used; null while that is not known")
    advice: str | None = Field(description="Remedy if it does not fit into the grace period")


class StoreStatus(BaseModel):
    """The object store."""

    url: str
    reached: bool
    verification: str | None = Field(None, description="How uploads are verified: store-crc, md5, read-back, fsync or off")
    conditional_put: bool | None = None


class Transfer(BaseModel):
    """A checkpoint that is being uploaded, or queued."""

    checkpoint: str
    state: str
    sent_bytes: int
    size_bytes: int
    reason: str | None = None


class Planned(BaseModel):
    """A checkpoint of the flush plan, with its prediction."""

    checkpoint: str
    verdict: Literal["fits", "may-fit", "no-time"]
    left_bytes: int
    predicted_s: float | None = Field(description="Seconds until it is durable; null before any rate was measured")
    reason: str | None = Field(None, description="Why it is not expected to be durable by the deadline")


class Volume(BaseModel):
    """The shared volume."""

    free_bytes: int | None = Field(description="null while the volume cannot be read")
    total_bytes: int | None


class Lease(BaseModel):
    """This pod's share of the lease of the prefix."""

    state: str = Field(description="waiting, held, fenced, or none: not the first node, or the store was not reached yet")
    reason: str | None = Field(None, description="What it waits for, or who has taken the prefix over")


class Cost(BaseModel):
    """Training that would be lost."""

    lost: str = Field(description="How much, such as 67 steps, nothing, or not known")
    why: str


class Safety(BaseModel):
    """Whether training is safe now."""

    level: Literal["safe", "unknown", "attention", "danger"]
    headline: str
    reasons: list[str] = Field(description="What else needs attention, most important first")
    kill: Cost = Field(description="What is lost if the pod is killed now, without notice")
    sigterm: Cost = Field(description="What is lost if the pod gets SIGTERM now")


class Status(BaseModel):
    """Status of the sidecar."""

    version: str
    phase: str
    safety: Safety = Field(description="Whether training on this pod is safe now")
    node_index: int | None = Field(None, description="Of this pod among those of the job; null: the settings do not say it")
    node_count: int | None = None
    degraded: bool = Field(description="The store is not usable now, or refuses a request again and again; training continues")
    degraded_reason: str | None = None
    store: StoreStatus
    trainer: Trainer
    termination: Termination | None = None
    lease: Lease
    newest_durable_step: int | None = None
    newest_finished_step: int | None = None
    queue: list[Transfer] = Field(description="Checkpoints that are not durable yet, in upload order")
    flush: list[Planned] | None = Field(None, description="After a termination notice: the flush plan, in sending order")
    given_up: dict[str, str] = Field(description="Finished checkpoints that will not be durable, with reasons")
    at_risk: AtRisk
    bandwidth_limit_bytes_per_s: int | None
    concurrency: int = Field(description="Current limit of concurrent large requests")
    throughput_bytes_per_s: float | None = None
    sent_bytes: int = Field(description="Since the sidecar started")
    retries: int
    volume: Volume
    rejected: dict[str, str] = Field(description="Local directories that are not valid checkpoints, with reasons")
    bad: dict[str, str] = Field(description="Checkpoints in the store that failed verification, with reasons")


class Checkpoint(BaseModel):
    """One checkpoint, on the volume, in the store or both."""

    name: str
    step: int | None = None
    state: str = Field(description="bad: it failed verification in the store, and a resume uses an older one")
    reason: str | None = Field(None, description="Reason of its state")
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


class Share(_RequestBody):
    """Ranks of a node's training processes, if each of them reads only its own files and the shared ones."""

    world_size: Annotated[int, _Number] = Field(ge=1, description="Training processes of the job")
    ranks: frozenset[Annotated[int, _Number]] = Field(min_length=1, description="Ranks of this node, each below world_size")

    @model_validator(mode="after")
    def _exists(self) -> Share:
        self.core()
        return self

    def core(self) -> rank_layout.Share:
        """Return the share as the core's type."""
        return rank_layout.Share(self.world_size, self.ranks)


class ResumeRequest(_RequestBody):
    """A resume request."""

    checkpoint: str = Field("latest", description="latest, checkpoint-<step> or final")
    train_call: Annotated[int | None, _Number] = Field(
        None, ge=0, description="Only checkpoints of this train() call of the script, from 0"
    )
    share: Share | None = Field(None, description="Leave out files that only ranks of other nodes read; absent: every file")
    asked_by: Literal["trainer", "person"] | None = Field(
        None, description="The trainer's requests have priority. Absent: the trainer, unless it has identified itself before"
    )


class PassedOver(BaseModel):
    """A checkpoint that was not used."""

    checkpoint: str
    reason: str
    may_be_whole: bool = Field(False, description="It is committed and not known to be bad; the next request tries it again")


class SaveIdentity(BaseModel):
    """What tells one writing of a step from another."""

    attempt: str | None = Field(description="Attempt that wrote it; null: unknown")
    save_id: str | None = Field(description="Id of the save; null: unknown, as of a copy that was downloaded before")
    finished_at: str | None = Field(description="Time of the marker of node 0, RFC 3339 in UTC; null: unknown")


class Resume(BaseModel):
    """Progress of a resume."""

    state: Literal["idle", "choosing", "downloading", "ready", "none", "failed"] = Field(
        description="none: certainly no usable checkpoint; failed: there is one, or may be, but it cannot be fetched now"
    )
    id: str | None = Field(None, description="For GET /v1/resume/{id}; lost when the sidecar restarts")
    asked_by: Literal["trainer", "person"] | None = None
    requested: str | None = None
    train_call: int | None = None
    share: Share | None = None
    checkpoint: str | None = None
    step: int | None = None
    path: str | None = Field(None, description="Path in the sidecar's container")
    source: Literal["local", "store"] | None = Field(None, description="local: it was on the volume at the request")
    downloaded: bool | None = Field(
        None,
        description="The files were downloaded, by this request or an earlier one; false: a trainer of this pod wrote them",
    )
    save: SaveIdentity | None = Field(None, description="The nodes of a job compare it; null: not ready")
    meta: dict[str, Any] = {}
    done_bytes: int
    total_bytes: int
    passed_over: list[PassedOver]
    detail: str | None = None


class FlushRequest(_RequestBody):
    """A flush request."""

    timeout_s: Annotated[float, _Number] = Field(30.0, ge=0, le=3600)


class Flushed(BaseModel):
    """All finished checkpoints are durable."""

    durable: list[str]


class BandwidthRequest(_RequestBody):
    """A new bandwidth limit."""

    limit: Annotated[Bytes, Field(gt=0)] | None = Field(
        None, description="Bytes per second of all uploads together, such as 200MB/s; null: no limit"
    )


class Bandwidth(BaseModel):
    """The bandwidth limit."""

    limit_bytes_per_s: int | None


class RoomRequest(_RequestBody):
    """A request for free space, such as the next checkpoint needs."""

    bytes: Annotated[Bytes, Field(ge=0)] = Field(description="Such as 20GB")


class Room(BaseModel):
    """Free space after the deletions."""

    free_bytes: int
    deleted: list[str] = Field(
        description="Checkpoints that left the volume: durable ones, then older ones that only a pin held"
    )


class SaveRequest(_RequestBody):
    """A request to save."""

    stop: bool = Field(False, description="End training after the save")


class Saving(BaseModel):
    """Progress of a save on request."""

    id: str
    action: str
    state: Literal["asked", "saved", "durable", "failed"] = Field(description="asked: not answered yet; saved: being uploaded")
    checkpoint: str | None = None
    detail: str | None = Field(None, description="The pending step, or the reason of the failure")
    sent_bytes: int | None = None
    size_bytes: int | None = None


class Draining(BaseModel):
    """Termination has begun."""

    phase: str
    deadline_in_s: float


class Durable(BaseModel):
    """The newest durable state of the run."""

    name: str
    step: int | None
    created_at: str | None = Field(description="When the trainer saved it")
    committed_at: str | None
    by_this_pod: bool = Field(description="false: it was found in the store")


class Earlier(BaseModel):
    """Checkpoints in the store that are not on the volume. They are read while somebody watches."""

    state: Literal["unread", "reading", "read", "failed"]
    folders: int | None = Field(None, description="Checkpoints in the store; null before they were listed")
    detail: str | None = None


class Transfers(BaseModel):
    """Uploads of this process."""

    throughput_bytes_per_s: float | None
    limit_bytes_per_s: int | None
    sent_bytes: int
    retries: int
    concurrency: int


class Overview(BaseModel):
    """Everything the live page shows. Lists are bounded, newest first."""

    at: str = Field(description="Time of the sidecar, RFC 3339")
    version: str
    job: str | None
    pod: str
    node_index: int | None
    node_count: int | None
    phase: str
    safety: Safety
    durable: Durable | None
    at_risk: AtRisk
    grace_seconds: float
    termination: Termination | None
    flush: list[Planned]
    trainer: Trainer
    store: StoreStatus
    degraded_reason: str | None
    lease: Lease
    checkpoints: list[Checkpoint]
    earlier: Earlier
    transfers: Transfers
    volume: Volume
    resume: Resume | None
    save: Saving | None = Field(description="The latest save request of this process")
    token_required: bool
