"""What a seed says: which store and settings, what the trainer does in each life of a sidecar, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.campaign.proxy import TROUBLES, Trouble

STORES = ("rgw", "minio", "moto", "file")
WEIGHTS = {"file": 0.4}
"""Of stores in the choice, 1 for the others: most faults are of the way to a store, which a folder does not have."""
SORTS = ("files", "hf", "nodes")
KIB, MIB = 1 << 10, 1 << 20
HF_EVERY = 10
"""One run of this number has a real trainer."""
NODES_EVERY = 5

ENDINGS = (
    "kill -9",
    "kill -9, trainer goes on",
    "pod lost",
    "SIGTERM",
    "SIGTERM, trainer goes on",
    "replaced while it lives",
)
"""How a life ends, but for the last one."""
ACTS = ("stopped for a while", "clock jumps", "volume full", "volume hangs", "volume read-only", "no inotify")
"""What befalls a sidecar or its volume in a life."""
MISHAPS = ("", "", "", "patched after the marker", "written again", "written again in place", "marker first gone, then killed")


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint of a trainer of files."""

    after_s: float
    sizes: tuple[int, ...]
    marker: str
    """``empty``, ``bare`` (``{}``) or ``full``."""
    mishap: str = ""
    slowly: bool = False
    """Written piece by piece, so that it is sent before it is finished."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a sidecar, or the overlap of two."""

    saves: tuple[Save, ...]
    troubles: tuple[Trouble, ...]
    ending: str
    ends_after_s: float
    from_the_start: bool = False
    """The troubles begin before the sidecar is up, not after."""
    act: str = ""
    act_at_s: float = 0.0
    act_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeAct:
    """What befalls the nodes of a job in one attempt."""

    kind: str
    """``cut off``, ``replaced while it lives``, ``pod lost``, ``sidecar killed``, ``sidecar stopped`` or none."""
    node: int
    at_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job of several nodes."""

    saves: tuple[Save, ...]
    acts: tuple[NodeAct, ...]
    troubles: tuple[Trouble, ...]


@dataclass(frozen=True)
class Story:
    """All of one run."""

    seed: int
    sort: str
    """``files``, ``hf`` or ``nodes``."""
    store: str
    settings: dict[str, str]
    tls: bool = False
    volume: str = "plain"
    """``plain``, ``small`` (a tmpfs of its own) or ``disk`` (a file system of its own, that can hang)."""
    lives: tuple[Life, ...] = ()
    rotates: int | None = None
    """Checkpoints that the trainer keeps on the volume; ``None``: all."""
    ends: str = "waits"
    """``waits`` for the last commit before SIGTERM, or ``at once``."""
    with_final: bool = False
    faults_in_resume: tuple[Trouble, ...] = ()
    nodes: int = 1
    nodes_at_resume: int = 1
    attempts: tuple[Attempt, ...] = field(default_factory=tuple)


def story(seed: int, stores: Sequence[str] = STORES) -> Story:
    """Return what a seed says. ``stores``: those to choose from; the rest of a story does not depend on them."""
    dice = random.Random(f"campaign {seed}")
    [store] = random.Random(f"store {seed}").choices(stores, [WEIGHTS.get(name, 1.0) for name in stores])
    settings = _settings(dice)
    if seed % HF_EVERY == HF_EVERY - 1:
        return Story(seed, "hf", store, settings, faults_in_resume=_troubles(dice, 6.0), lives=(_hf_life(dice),))
    if seed % NODES_EVERY == NODES_EVERY - 2:
        nodes = dice.choice((3, 3, 4, 5))
        attempts = tuple(_attempt(dice, nodes) for _ in range(dice.choice((1, 2, 2, 3))))
        at_resume = dice.choice((1, 2, nodes, nodes + 1))
        settings.pop("CKPT_SUPERSEDED", None)
        return Story(seed, "nodes", store, settings, nodes=nodes, nodes_at_resume=at_resume, attempts=attempts)
    lives = tuple(_life(dice) for _ in range(dice.choice((1, 2, 2, 3, 3, 4))))
    return Story(
        seed,
        "files",
        store,
        settings,
        tls=dice.random() < 0.2,
        volume=_volume(lives),
        lives=lives,
        rotates=dice.choice((None, None, 1, 2, 3)),
        ends=dice.choice(("waits", "at once")),
        with_final=dice.random() < 0.15,
        faults_in_resume=_troubles(dice, 5.0) if dice.random() < 0.3 else (),
    )


def _settings(dice: random.Random) -> dict[str, str]:
    settings = {"CKPT_GRACE_SECONDS": str(dice.choice((8, 12, 20))), "CKPT_PART_SIZE": "5Mi"}
    choices: dict[str, Sequence[str]] = {
        "CKPT_KEEP_STORE": ("", "", "1", "2", "3"),
        "CKPT_KEEP_LOCAL": ("", "1", "2", "9"),
        "CKPT_SUPERSEDED": ("", "", "skip"),
        "CKPT_RESUME": ("", "", "on-demand"),
        "CKPT_S3_CLIENT": ("", "", "", "boto3"),
        "CKPT_CONCURRENCY": ("", "", "2", "4"),
        "CKPT_MODE": ("", "", "classic"),
        "CKPT_VERIFY": ("", "", "", "", "read-back"),
    }
    return settings | {name: value for name, values in choices.items() if (value := dice.choice(values))}


def _troubles(dice: random.Random, life_s: float) -> tuple[Trouble, ...]:
    """One or two faults, which may overlap; now and then none."""
    number = dice.choice((0, 1, 1, 1, 2, 2))
    return tuple(_trouble(dice, life_s) for _ in range(number))


def _trouble(dice: random.Random, life_s: float) -> Trouble:
    kind = dice.choice(TROUBLES)
    begin_s = dice.choice((0.0, dice.uniform(0.0, life_s * 0.7)))
    share = dice.choice((0.15, 0.4, 1.0))
    if kind in ("bits flipped up", "bits flipped down", "silent requests", "stalled", "silent connections"):
        share = dice.choice((0.05, 0.15, 0.4))
    return Trouble(kind, begin_s, dice.uniform(1.0, life_s), share, dice.choice((0.5, 2.0, 8.0)))


def _save(dice: random.Random) -> Save:
    sizes = [dice.randrange(1, 60) * KIB + dice.randrange(KIB) for _ in range(dice.randrange(1, 6))]
    sizes += [0] if dice.random() < 0.2 else []
    sizes += [dice.choice((2, 6, 11, 16)) * MIB + dice.randrange(KIB)] if dice.random() < 0.35 else []
    mishap = dice.choice(MISHAPS)
    slowly = dice.random() < 0.15
    return Save(dice.uniform(0.05, 0.9), tuple(sizes), dice.choice(("empty", "bare", "full", "full")), mishap, slowly)


def _life(dice: random.Random) -> Life:
    saves = tuple(_save(dice) for _ in range(dice.randrange(1, 6)))
    life_s = dice.uniform(1.5, 7.0)
    act = dice.choice((*ACTS, *[""] * 8))
    ending = dice.choice(ENDINGS)
    act_at_s, act_s = dice.uniform(0.2, life_s * 0.6), dice.uniform(0.5, 6.0)
    return Life(saves, _troubles(dice, life_s), ending, life_s, dice.random() < 0.4, act, act_at_s, act_s)


def _hf_life(dice: random.Random) -> Life:
    return Life((), _troubles(dice, 8.0), "SIGTERM", dice.uniform(0.0, 8.0))


def _volume(lives: Sequence[Life]) -> str:
    acts = {life.act for life in lives}
    if acts & {"volume hangs", "volume read-only"}:
        return "disk"
    return "small" if "volume full" in acts else "plain"


def _attempt(dice: random.Random, nodes: int) -> Attempt:
    kinds = (
        "cut off",
        "cut off",
        "replaced while it lives",
        "replaced while it lives",
        "sidecar killed",
        "sidecar stopped",
        "pod lost",
        "",
    )
    saves = tuple(_save(dice) for _ in range(dice.randrange(2, 5)))
    acts = tuple(
        NodeAct(dice.choice(kinds), dice.randrange(nodes), dice.uniform(0.2, 3.0), dice.uniform(1.0, 6.0))
        for _ in range(dice.choice((1, 1, 2)))
    )
    return Attempt(saves, acts, _troubles(dice, 5.0) if dice.random() < 0.5 else ())
