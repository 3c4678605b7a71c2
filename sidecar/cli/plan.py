"""``plan``: what a run will need, before it starts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from sidecar.cli.client import Client
from sidecar.cli.estimate import (
    Line,
    Measured,
    Rate,
    Size,
    check_number,
    measured_size_bytes,
    parsed,
    parsed_bytes,
    percent_text,
    positive_s,
    print_estimate,
    usd_text,
)
from sidecar.cli.options import Json
from sidecar.cli.render import counted
from sidecar.core.format.durations import duration_s
from sidecar.core.format.readable import rate_text, seconds_text, size_text
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.planning.cost import WEEKS, LostWork, Policy, Prices, StoreCost, lost_work, store_cost
from sidecar.core.planning.grace import Grace, plan_grace
from sidecar.core.planning.interval import Interval, plan_interval
from sidecar.core.planning.storage import (
    DTYPE_BYTES,
    GUIDE_KEEP,
    HEADROOM,
    OPTIMIZER_BYTES,
    STRATEGIES,
    Storage,
    guide_storage,
    measured_storage,
    parameter_count,
    state_storage,
)
from sidecar.errors import ConfigurationError

plan = typer.Typer(rich_markup_mode=None, help="Calculate storage, save interval, grace period or cost.")

GUIDE = (
    "results of the guide to checkpointing on OpenShift AI (DDP 8B 275 GB, FSDP 7B 200 GB, ZeRO-3 70B LoRA 168 GB); "
    "the multipliers are derived from these, for bf16 and 2 kept checkpoints"
)
STATE = "dtype and optimizer: AdamW has two moments per parameter, SGD with momentum has one"
MEASURED = "sizes in /v1/checkpoints of the running sidecar, the largest"


@plan.command()
def storage(
    parameters: Annotated[str | None, typer.Option(metavar="COUNT", help="of the model, such as 8B")] = None,
    strategy: Annotated[Literal["ddp", "fsdp", "zero3-lora"] | None, typer.Option(help="multiplier of the guide")] = None,
    optimizer: Annotated[
        Literal["none", "momentum", "adamw", "adamw-bf16", "adamw-8bit"] | None, typer.Option(help="its saved state")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "fp8"], typer.Option(help="of the saved weights")] = "bf16",
    master: Annotated[bool, typer.Option("--master", help="with --optimizer: fp32 master weights are saved, too")] = False,
    size: Size = None,
    measured: Measured = False,
    keep: Annotated[int, typer.Option(min=1, max=10_000, help="checkpoints kept on the volume, CKPT_KEEP_LOCAL")] = GUIDE_KEEP,
    as_json: Json = False,
) -> int:
    """Space on the volume: from --parameters with --strategy or --optimizer, from --size, or --measured.

    Formula: storage = checkpoint x (keep + 1) x 1.2; the one more is the checkpoint being written.
    With --strategy: checkpoint = parameters x bytes of the dtype x multiplier. The multipliers are derived from the results
    of the OpenShift AI guide: DDP 8B 275 GB, FSDP 7B 200 GB, ZeRO-3 70B LoRA 168 GB (there only the gathered weights count).
    With --optimizer: checkpoint = parameters x (bytes of the dtype + of the optimizer + of master weights).
    """
    _require_one_way(parameters, strategy, optimizer, size, measured=measured)
    if master and optimizer is None:
        raise ConfigurationError("--master: needs --optimizer")
    inputs: dict[str, Any] = {"keep": keep, "headroom": float(HEADROOM)}
    if size is not None or measured:
        one = parsed_bytes("--size", size) if size is not None else measured_size_bytes()
        needed, source = measured_storage(one, keep=keep), MEASURED if measured else "--size"
        lines = _storage_lines(needed, "the largest that the sidecar knows" if measured else "as given", keep)
        formula = "storage = checkpoint x (keep + 1) x headroom; checkpoint = its size"
        return print_estimate(lines, formula=formula, source=source, inputs=inputs, results=asdict(needed), as_json=as_json)
    count = parsed("--parameters", parameters or "", parameter_count)
    inputs |= {"parameters": count, "dtype": dtype, "dtype_bytes": DTYPE_BYTES[dtype]}
    of = f"{count:,} parameters in {dtype}"
    if strategy is not None:
        known = STRATEGIES[strategy]
        inputs |= {"strategy": strategy, "multiplier": float(known.multiplier)}
        needed = guide_storage(count, strategy=strategy, dtype=dtype, keep=keep)
        copies = "(keep + 1)" if known.keeps_copies else "1 gathered copy (those kept hold adapters)"
        formula = f"storage = checkpoint x {copies} x headroom; checkpoint = parameters x dtype bytes x multiplier"
        of = f"{of}, strategy {strategy} (guide to checkpointing on OpenShift AI)"
        lines = _storage_lines(needed, of, keep if known.keeps_copies else None)
        return print_estimate(lines, formula=formula, source=GUIDE, inputs=inputs, results=asdict(needed), as_json=as_json)
    inputs |= {"optimizer": optimizer, "optimizer_bytes": OPTIMIZER_BYTES[optimizer or "none"], "master": master}
    needed = state_storage(count, optimizer=optimizer or "none", dtype=dtype, master=master, keep=keep)
    formula = "storage = checkpoint x (keep + 1) x headroom; checkpoint = parameters x (dtype + optimizer + 4 for master bytes)"
    lines = _storage_lines(needed, f"{of}, optimizer {optimizer}{', fp32 master weights' if master else ''}", keep)
    return print_estimate(lines, formula=formula, source=STATE, inputs=inputs, results=asdict(needed), as_json=as_json)


def _storage_lines(needed: Storage, of: str, keep: int | None) -> list[Line]:
    """Return the answer. ``keep``: durable checkpoints on the volume; ``None``: only one is there, being gathered."""
    copies = (
        "the one that is gathered (those kept hold adapters alone)"
        if keep is None
        else f"{needed.copies} checkpoints (the one being written and CKPT_KEEP_LOCAL={keep})"
    )
    return [
        ("volume", f"{size_text(needed.storage_bytes)} for {copies}, with a fifth of headroom"),
        ("checkpoint", f"{size_text(needed.checkpoint_bytes)}: {of}"),
    ]


def _require_one_way(
    parameters: str | None, strategy: str | None, optimizer: str | None, size: str | None, *, measured: bool
) -> None:
    ways = [parameters is not None and strategy is not None, parameters is not None and optimizer is not None]
    ways += [size is not None, measured]
    if parameters is not None:
        parsed("--parameters", parameters, parameter_count)  # before what is missing
        if sum(ways) == 0:
            raise ConfigurationError("--parameters: add --strategy (ddp, fsdp, zero3-lora) or --optimizer (such as adamw)")
    if sum(ways) != 1 or (parameters is not None and not any(ways[:2])) or (parameters is None and (strategy or optimizer)):
        raise ConfigurationError("one of: --parameters with --strategy, --parameters with --optimizer, --size, --measured")


INTERVAL = (
    "Young 1974, 'A first order approximation to the optimum checkpoint interval'; Daly 2006, 'A higher order estimate of the "
    "optimum checkpoint interval for restart dumps'; lost time by Daly's complete cost function"
)


@plan.command()
def interval(
    stall: Annotated[str, typer.Option(metavar="DURATION", help="that a save holds training, such as 12s")],
    mtbf: Annotated[str, typer.Option(metavar="DURATION", help="mean time between two kills of the run, such as 12h")],
    restart: Annotated[str, typer.Option(metavar="DURATION", help="from a kill until training goes on")] = "5m",
    size: Size = None,
    rate: Rate = None,
    step: Annotated[str | None, typer.Option(metavar="DURATION", help="of an optimizer step, such as 1.3s")] = None,
    as_json: Json = False,
) -> int:
    """Training between two saves that loses the least time, for kills without notice.

    C is --stall, M is --mtbf, R is --restart. Young: sqrt(2CM). Daly: sqrt(2CM)(1 + sqrt(C/2M)/3 + C/18M) - C, or M if C >= 2M.
    Lost share: 1 - T / (M exp(R/M) (exp((T + C)/M) - 1)). With --size and --rate, T + C is at least the time U of an upload,
    and R is R + U: what is on its way is lost, too.
    """
    if (size is None) != (rate is None):
        raise ConfigurationError("--size and --rate: both or none")
    given = {
        "stall_s": parsed("--stall", stall, positive_s),
        "mtbf_s": parsed("--mtbf", mtbf, positive_s),
        "restart_s": parsed("--restart", restart, duration_s),
        "size_bytes": None if size is None else parsed_bytes("--size", size),
        "bytes_per_s": None if rate is None else parsed_bytes("--rate", rate),
        "step_s": None if step is None else parsed("--step", step, positive_s),
    }
    formula = (
        "young = sqrt(2CM); daly = young (1 + sqrt(C/2M)/3 + C/18M) - C, or M if C >= 2M; interval = max(daly, upload - C); "
        "lost = 1 - T / (M exp((R + upload)/M) (exp((T + C)/M) - 1)); C stall, M mtbf, R restart, T interval"
    )
    found = plan_interval(**given)  # type: ignore[arg-type]
    lines = _interval_lines(found, given)
    return print_estimate(lines, formula=formula, source=INTERVAL, inputs=given, results=asdict(found), as_json=as_json)


def _interval_lines(found: Interval, given: dict[str, Any]) -> list[Line]:
    steps = "" if found.save_steps is None else f", {counted(found.save_steps, 'step')}"
    lines = [
        ("save every", f"{seconds_text(found.interval_s)} of training{steps}"),
        ("lost", f"{percent_text(found.lost_percent)} of the time, in saves, work done twice and restarts"),
    ]
    if found.upload_s is not None:
        least = f"; on a faster link {seconds_text(found.daly_s)} would lose less" if found.is_limited_by_link else ""
        sent = f"{size_text(given['size_bytes'])} at {rate_text(given['bytes_per_s'])}"
        lines.append(("an upload", f"takes {seconds_text(found.upload_s)} ({sent}){least}"))
    assumed = f"a save holds training for {seconds_text(given['stall_s'])}, a kill every {seconds_text(given['mtbf_s'])}"
    lines.append(("if", f"{assumed}, {seconds_text(given['restart_s'])} until training goes on (Daly 2006)"))
    return lines


Now = Annotated[
    str | None,
    typer.Option("--grace", metavar="DURATION", help="of the pod as it is; else the sidecar's (--measured), or 30s"),
]


@plan.command()
def grace(
    save: Annotated[str | None, typer.Option(metavar="DURATION", help="that the trainer writes, such as 12s")] = None,
    size: Size = None,
    rate: Rate = None,
    step: Annotated[str, typer.Option(metavar="DURATION", help="of an optimizer step, which is finished first")] = "0s",
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="that must agree to stop")] = 1,
    now: Now = None,
    measured: Measured = False,
    as_json: Json = False,
) -> int:
    """TerminationGracePeriodSeconds for a just-in-time save, by the rule of the running sidecar ("grace_too_short").

    Formula: durable = step + 1 s if there are several ranks + save + size / rate; recommended = 1.25 durable + margin.
    The margin of the grace period, a twentieth of it, 0.5 to 2 s, is for commit, report and exit.
    With --measured, save, size, rate and grace are those of the running sidecar unless they are given.
    """
    grace_s = None if now is None else parsed("--grace", now, positive_s)
    rate_bytes_per_s = None if rate is None else float(parsed_bytes("--rate", rate))
    size_of_one = None if size is None else parsed_bytes("--size", size)
    save_s = None if save is None else parsed("--save", save, duration_s)
    step_s = parsed("--step", step, duration_s)
    if measured:
        running = Client(timeout_s=60).get("/v1/overview")
        grace_s = grace_s or running["grace_seconds"]
        rate_bytes_per_s = rate_bytes_per_s or running["transfers"]["throughput_bytes_per_s"]
        if save_s is None:  # measured with the rest of the step and the agreement of the ranks
            save_s, step_s, ranks = running["at_risk"]["predicted_save_s"], 0.0, 1
        size_of_one = size_of_one or measured_size_bytes()
    if save_s is None or size_of_one is None or not rate_bytes_per_s:
        missing = "the running sidecar has not measured a save and an upload yet: " if measured else ""
        raise ConfigurationError(f"{missing}give --save, --size and --rate")
    grace_s = grace_s or duration_s("30s")
    profile = SaveProfile(size_of_one, took_s=save_s, step_seconds=step_s, ranks=ranks)
    inputs = {"save_s": save_s, "size_bytes": size_of_one, "bytes_per_s": rate_bytes_per_s, "step_s": step_s}
    inputs |= {"ranks": ranks, "grace_s": grace_s}
    formula = "durable = step + 1 s if ranks > 1 + save + size / rate; recommended = 1.25 durable + margin, in whole seconds"
    source = f"the rule by which the sidecar warns of a short grace period, {'measured' if measured else 'as given'}"
    needed = plan_grace(save=profile, bytes_per_s=rate_bytes_per_s, grace_s=grace_s)
    lines = _grace_lines(needed, inputs)
    return print_estimate(lines, formula=formula, source=source, inputs=inputs, results=asdict(needed), as_json=as_json)


def _grace_lines(needed: Grace, given: dict[str, Any]) -> list[Line]:
    sent = f"{size_text(given['size_bytes'])} at {rate_text(given['bytes_per_s'])}"
    return [
        ("grace period", f"{needed.recommended_s} s, as terminationGracePeriodSeconds and CKPT_GRACE_SECONDS"),
        ("as it is", f"{given['grace_s']:g} s, which is {'enough' if needed.fits else 'too short'}"),
        ("durable", f"{seconds_text(needed.durable_s)} after SIGTERM"),
        ("save", f"{seconds_text(needed.save_s)}, with the rest of the step"),
        ("upload", f"{seconds_text(needed.upload_s)} ({sent})"),
    ]


ARTICLE = (
    "Red Hat, 'Resilient model training on Red Hat OpenShift AI with Kubeflow Trainer': 8 GPUs for $55 an hour; the defaults "
    "of --interruptions, --lost (in an example there), --restart and --stalls are derived from its totals, $213 and $37 a week"
)
PRICES = "price list of Amazon S3 Standard, us-east-1, first 50 TB; GB are 2^30 bytes; transfer within the region is free"
WORK_FORMULA = (
    "periodic = interruptions x (lost + restart) + stalls; jit = interruptions x restart + jit_stalls, per week; "
    f"usd = time x gpus x gpu_hour; year = {WEEKS} weeks"
)
STORE_FORMULA = (
    "stored = size x kept at the end of 30 days; store = stored / 2^30 x gb_month + (PUT x put + GET x get) / 1000; "
    "PUT per save = parts + 2 per file of several parts, and manifest and commit"
)


@plan.command()
def cost(
    *,
    gpus: Annotated[int, typer.Option(min=1, max=1_000_000, help="of the run")] = 8,
    gpu_hour: Annotated[float, typer.Option(metavar="DOLLARS", help="price of one GPU")] = 6.875,
    interruptions: Annotated[float, typer.Option(metavar="COUNT", help="per week")] = 1.0,
    lost: Annotated[str, typer.Option(metavar="DURATION", help="of training, since the latest periodic checkpoint")] = "3h",
    restart: Annotated[str, typer.Option(metavar="DURATION", help="until training goes on")] = "40m",
    stalls: Annotated[str, typer.Option(metavar="DURATION", help="per week, of training held by periodic saves")] = "12m",
    jit_stalls: Annotated[str, typer.Option(metavar="DURATION", help="the same besides just-in-time checkpoints")] = "0s",
    size: Size = None,
    files: Annotated[int, typer.Option(min=1, max=100_000, help="of one checkpoint")] = 10,
    every: Annotated[str, typer.Option(metavar="DURATION", help="between two saves")] = "1h",
    save_steps: Annotated[int, typer.Option(min=1, max=10**9, help="optimizer steps between two saves")] = 500,
    keep: Annotated[int | None, typer.Option(min=1, max=10**6, help="CKPT_KEEP_STORE (default all)")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, max=10**12, help="CKPT_KEEP_EVERY_STEPS (default none)")] = None,
    gb_month: Annotated[float, typer.Option(metavar="DOLLARS", help="price of a GB in S3")] = 0.023,
    put: Annotated[float, typer.Option(metavar="DOLLARS", help="price of 1000 PUT requests")] = 0.005,
    get: Annotated[float, typer.Option(metavar="DOLLARS", help="price of 1000 GET requests")] = 0.0004,
    as_json: Json = False,
) -> int:
    """Cost of lost GPU work, and, with --size, of a month of checkpoints in S3.

    Periodic: interruptions x (lost + restart) + stalls. Just in time: interruptions x restart + jit-stalls. Both per week,
    times the price of all GPUs; a year has 52 weeks. The defaults give the article of Red Hat on just-in-time checkpoints:
    $213 and $37 a week, about $9,100 a year. 8 GPUs for $55 an hour are stated there, the other defaults derived.
    S3: kept checkpoints x size at the end of a month of 30 days, under --keep and --keep-every, and the requests of saves
    and resumes. Prices: Amazon S3 Standard, us-east-1.
    """
    usd = {"--gpu-hour": gpu_hour, "--gb-month": gb_month, "--put": put, "--get": get}
    for option, number in {**usd, "--interruptions": interruptions}.items():
        check_number(option, number)
    times = _times(lost=lost, restart=restart, stalls=stalls, jit_stalls=jit_stalls)
    work = lost_work(cluster_hour_usd=gpus * gpu_hour, interruptions=interruptions, **times)
    inputs: dict[str, Any] = {"gpus": gpus, "gpu_hour_usd": gpu_hour, "interruptions_per_week": interruptions, **times}
    if size is None:
        lines = _work_lines(work, inputs)
        return print_estimate(lines, formula=WORK_FORMULA, source=ARTICLE, inputs=inputs, results=asdict(work), as_json=as_json)
    policy = Policy(parsed("--every", every, positive_s), save_steps, keep, keep_every)
    prices, one, resumes = Prices(gb_month, put, get), parsed_bytes("--size", size), interruptions * WEEKS / 12
    inputs |= {"size_bytes": one, "files": files, **_named(policy), **asdict(prices), "resumes_per_month": resumes}
    stored = _store_cost(one, files, policy, resumes, prices)
    lines, results = _work_lines(work, inputs) + _store_lines(stored, inputs), asdict(work) | asdict(stored)
    formula = f"{WORK_FORMULA}; {STORE_FORMULA}"
    return print_estimate(
        lines, formula=formula, source=f"{ARTICLE}; {PRICES}", inputs=inputs, results=results, as_json=as_json
    )


def _times(**given: str) -> dict[str, float]:
    """Return the seconds of durations, by the names of their options."""
    return {f"{name}_s": parsed(f"--{name.replace('_', '-')}", text, duration_s) for name, text in given.items()}


def _work_lines(work: LostWork, given: dict[str, Any]) -> list[Line]:
    often = f"interrupted {given['interruptions_per_week']:g} times a week, {seconds_text(given['restart_s'])} to restart"
    lost = f"each time {seconds_text(given['lost_s'])} of work lost; {seconds_text(given['stalls_s'])} a week in saves"
    return [
        ("periodic saves", f"{usd_text(work.periodic_week_usd)} a week: {seconds_text(work.periodic_s)} of all GPUs"),
        ("just-in-time saves", f"{usd_text(work.jit_week_usd)} a week: {seconds_text(work.jit_s)} of all GPUs"),
        ("saved", f"{usd_text(work.saved_week_usd)} a week, {usd_text(work.saved_year_usd)} a year"),
        ("if", f"{given['gpus']} GPUs at ${given['gpu_hour_usd']:g} an hour; {often}; {lost}"),
    ]


def _store_lines(stored: StoreCost, given: dict[str, Any]) -> list[Line]:
    sent = f"{stored.put_requests:,} PUT and {stored.get_requests:,} GET requests"
    return [
        ("store", f"{usd_text(stored.store_month_usd)} a month"),
        ("  space", f"{usd_text(stored.storage_month_usd)}: {size_text(stored.stored_bytes)} at the end of the month"),
        ("  requests", f"{usd_text(stored.requests_month_usd)}: {sent}"),
        ("  kept", f"{stored.kept} of {stored.saves} checkpoints of {size_text(given['size_bytes'])}"),
    ]


def _named(policy: Policy) -> dict[str, Any]:
    return {
        "every_s": policy.interval_s,
        "save_steps": policy.save_steps,
        "keep_store": policy.keep_newest,
        "keep_every_steps": policy.keep_every_steps,
    }


def _store_cost(one_bytes: int, files: int, policy: Policy, resumes: float, prices: Prices) -> StoreCost:
    try:
        return store_cost(size_bytes=one_bytes, files=files, policy=policy, resumes=resumes, prices=prices)
    except ValueError as error:
        raise ConfigurationError(f"--every={policy.interval_s:g}s: {error}") from None
