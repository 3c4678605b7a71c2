"""``plan interval`` and ``plan grace``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from sidecar.cli.client import Client
from sidecar.cli.estimate import Measured, Rate, Size, measured_size_bytes, parsed, parsed_bytes, positive_s, print_estimate
from sidecar.cli.options import Json
from sidecar.core.format.durations import duration_s
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.planning.grace import plan_grace
from sidecar.core.planning.interval import plan_interval
from sidecar.errors import ConfigurationError

INTERVAL = (
    "Young 1974, 'A first order approximation to the optimum checkpoint interval'; Daly 2006, 'A higher order estimate of the "
    "optimum checkpoint interval for restart dumps'; lost time by Daly's complete cost function"
)


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
    return print_estimate(formula, INTERVAL, given, asdict(plan_interval(**given)), as_json=as_json)  # type: ignore[arg-type]


def grace(
    save: Annotated[str | None, typer.Option(metavar="DURATION", help="that the trainer writes, such as 12s")] = None,
    size: Size = None,
    rate: Rate = None,
    step: Annotated[str, typer.Option(metavar="DURATION", help="of an optimizer step, which is finished first")] = "0s",
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="that must agree to stop")] = 1,
    now: Annotated[str, typer.Option("--grace", metavar="DURATION", help="of the pod as it is")] = "30s",
    measured: Measured = False,
    as_json: Json = False,
) -> int:
    """TerminationGracePeriodSeconds for a just-in-time save, by the rule of the running sidecar ("grace_too_short").

    Formula: durable = step + 1 s if there are several ranks + save + size / rate; recommended = 1.25 durable + margin.
    The margin of the grace period, a twentieth of it, 0.5 to 2 s, is for commit, report and exit.
    With --measured, save, size and rate are those of the running sidecar unless they are given.
    """
    grace_s = parsed("--grace", now, positive_s)
    rate_bytes_per_s = None if rate is None else float(parsed_bytes("--rate", rate))
    size_of_one = None if size is None else parsed_bytes("--size", size)
    save_s = None if save is None else parsed("--save", save, duration_s)
    step_s = parsed("--step", step, duration_s)
    if measured:
        status = Client(timeout_s=60).get("/v1/status")
        rate_bytes_per_s = rate_bytes_per_s or status["throughput_bytes_per_s"]
        if save_s is None:  # measured with the rest of the step and the agreement of the ranks
            save_s, step_s, ranks = status["at_risk"]["predicted_save_s"], 0.0, 1
        size_of_one = size_of_one or measured_size_bytes()
    if save_s is None or size_of_one is None or not rate_bytes_per_s:
        missing = "the running sidecar has not measured a save and an upload yet: " if measured else ""
        raise ConfigurationError(f"{missing}give --save, --size and --rate")
    profile = SaveProfile(size_of_one, took_s=save_s, step_seconds=step_s, ranks=ranks)
    inputs = {
        "save_s": save_s,
        "size_bytes": size_of_one,
        "bytes_per_s": rate_bytes_per_s,
        "step_s": step_s,
        "ranks": ranks,
        "grace_s": grace_s,
    }
    formula = "durable = step + 1 s if ranks > 1 + save + size / rate; recommended = 1.25 durable + margin, in whole seconds"
    source = "sidecar.core.lifecycle.risk, the rule of grace_too_short; " + ("measured" if measured else "as given")
    needed = plan_grace(save=profile, bytes_per_s=rate_bytes_per_s, grace_s=grace_s)
    return print_estimate(formula, source, inputs, asdict(needed), as_json=as_json)
