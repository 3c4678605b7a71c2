"""``plan cost``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from sidecar.cli.estimate import Size, check_number, parsed, parsed_bytes, positive_s, print_estimate
from sidecar.cli.options import Json
from sidecar.core.format.durations import duration_s
from sidecar.core.planning.cost import WEEKS, Policy, Prices, StoreCost, lost_work, store_cost
from sidecar.errors import ConfigurationError

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
    times = {
        "lost_s": parsed("--lost", lost, duration_s),
        "restart_s": parsed("--restart", restart, duration_s),
        "stalls_s": parsed("--stalls", stalls, duration_s),
        "jit_stalls_s": parsed("--jit-stalls", jit_stalls, duration_s),
    }
    work = lost_work(cluster_hour_usd=gpus * gpu_hour, interruptions=interruptions, **times)
    inputs: dict[str, Any] = {"gpus": gpus, "gpu_hour_usd": gpu_hour, "interruptions_per_week": interruptions, **times}
    if size is None:
        return print_estimate(WORK_FORMULA, ARTICLE, inputs, asdict(work), as_json=as_json)
    policy = Policy(parsed("--every", every, positive_s), save_steps, keep, keep_every)
    prices, one, resumes = Prices(gb_month, put, get), parsed_bytes("--size", size), interruptions * WEEKS / 12
    inputs |= {"size_bytes": one, "files": files, **_named(policy), **asdict(prices), "resumes_per_month": resumes}
    results = asdict(work) | asdict(_store_cost(one, files, policy, resumes, prices))
    return print_estimate(f"{WORK_FORMULA}; {STORE_FORMULA}", f"{ARTICLE}; {PRICES}", inputs, results, as_json=as_json)


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
