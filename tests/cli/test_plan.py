"""``plan``: the numbers of guide and article, inputs and formula with every answer, errors in one line and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.cli.main import main
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

INTERVAL = ["interval", "--stall", "12s", "--mtbf", "12h"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    assert err == ""
    assert set(found) == {"formula", "source", "inputs", "results"}
    return found


@pytest.mark.parametrize(
    ("parameters", "strategy", "storage"),
    [("8B", "ddp", "275 GB"), ("7B", "fsdp", "200 GB"), ("70B", "zero3-lora", "168 GB")],
)
def test_the_guides_examples_are_printed(
    parameters: str, strategy: str, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "storage", "--parameters", parameters, "--strategy", strategy]) == 0
    assert capsys.readouterr().out.startswith(f"volume      {storage} for ")


def test_the_articles_costs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cost"]) == 0
    out = capsys.readouterr().out
    for line in (
        "periodic saves      $213 a week",
        "just-in-time saves  $37 a week",
        "saved               $176 a week, $9,152 a year",
    ):
        assert line in out


EVERY = [
    ["storage", "--parameters", "8B", "--strategy", "fsdp"],
    ["storage", "--parameters", "8B", "--optimizer", "adamw", "--master"],
    ["storage", "--size", "48GB"],
    [*INTERVAL, "--size", "480GB", "--rate", "200MB/s", "--step", "7s"],
    ["grace", "--save", "12s", "--size", "48GB", "--rate", "1GB/s", "--step", "1s", "--ranks", "8"],
    ["cost", "--size", "48GB", "--keep", "3", "--keep-every", "5000"],
]


@pytest.mark.parametrize("arguments", EVERY, ids=" ".join)
def test_a_person_reads_one_screen_without_names_of_the_program(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") <= 10
    assert max(map(len, out.splitlines())) <= 150
    assert re.search(r"[a-z]_[a-z]|sidecar\.|[0-9]\.[0-9]{3}|[KMGT]iB", out.replace("$6.875", "")) is None


def test_the_answers_of_an_interval_and_a_grace_period_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *EVERY[3]])
    main(["plan", *EVERY[4]])
    assert capsys.readouterr().out.splitlines() == [
        "save every  39 min 48 s of training, 342 steps",
        "lost        9.10 % of the time, in saves, work done twice and restarts",
        "an upload   takes 40 min (480 GB at 200 MB/s); on a faster link 16 min 50 s would lose less",
        "if          a save holds training for 12 s, a kill every 12 h, 5 min until training goes on (Daly 2006)",
        "grace period  80 s, as terminationGracePeriodSeconds and CKPT_GRACE_SECONDS",
        "as it is      30 s, which is too short",
        "durable       62 s after SIGTERM",
        "save          14 s, with the rest of the step",
        "upload        48 s (48 GB at 1 GB/s)",
    ]


def test_calculated_numbers_have_six_digits_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *INTERVAL)["results"]["young_s"] == 1018.23
    assert answer(capsys, *EVERY[0])["inputs"]["multiplier"] == 3.96825
    assert "sidecar." not in answer(capsys, *EVERY[4])["source"]


def test_storage_from_what_is_saved_and_from_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    state = answer(capsys, "storage", "--parameters", "8B", "--optimizer", "adamw", "--master", "--keep", "1")
    assert state["results"] == {"checkpoint_bytes": 112 * 10**9, "copies": 2, "storage_bytes": 268_800_000_000}
    assert state["inputs"]["optimizer_bytes"] == 8
    size = answer(capsys, "storage", "--size", "48GB")
    assert size["results"]["storage_bytes"] == 172_800_000_000


def test_an_interval_names_the_limit_of_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    alone = answer(capsys, *INTERVAL)
    assert alone["results"]["upload_s"] is alone["results"]["save_steps"] is None
    sent = answer(capsys, *INTERVAL, "--size", "480GB", "--rate", "200MB/s", "--step", "7s")
    assert sent["inputs"]["bytes_per_s"] == 200_000_000
    assert sent["results"]["interval_s"] == 2388
    assert sent["results"]["is_limited_by_link"]
    assert sent["results"]["save_steps"] == 342


def test_a_grace_period_for_a_save(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "grace", "--save", "12s", "--size", "48GB", "--rate", "1GB/s", "--step", "1s", "--ranks", "8")
    assert (found["results"]["recommended_s"], found["results"]["fits"]) == (80, False)
    found = answer(capsys, "grace", "--save", "12s", "--size", "48GB", "--rate", "1GB/s", "--grace", "2m")
    assert found["results"]["fits"]


def test_costs_in_s3_follow_policy_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    policy = ["--keep", "3", "--keep-every", "5000"]
    month = answer(capsys, "cost", "--size", "48GiB", *policy)
    assert (month["results"]["saves"], month["results"]["kept"]) == (720, 74)
    assert month["inputs"]["gb_month_usd"] == 0.023
    assert "Amazon S3" in month["source"]
    free = answer(capsys, "cost", "--size", "48GiB", *policy, "--gb-month", "0", "--put", "0", "--get", "0")
    assert free["results"]["store_month_usd"] == 0
    assert "store_month_usd" not in answer(capsys, "cost")["results"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["storage"], "one of: --parameters with --strategy"),
        (["storage", "--parameters", "8B", "--size", "1GB"], "one of: --parameters with --strategy"),
        (["storage", "--strategy", "ddp", "--size", "1GB"], "one of: --parameters with --strategy"),
        (["storage", "--size", "1GB", "--master"], "--master: needs --optimizer"),
        (["storage", "--parameters", "8GB", "--strategy", "ddp"], "--parameters='8GB': must be a number of parameters"),
        (["storage", "--size", "moon"], "--size='moon': must be an amount"),
        (["storage", "--size", "0"], "--size='0': must be more than 0"),
        (["storage", "--size", "2000000TB"], "must be more than 0 and at most 1000PB"),
        (["storage", "--parameters", "8B", "--strategy", "pp"], "'pp' is not one of"),
        (["interval", "--stall", "12s"], "Missing option '--mtbf'"),
        (["interval", "--stall", "0s", "--mtbf", "1h"], "--stall='0s': must be more than 0"),
        ([*INTERVAL, "--size", "1GB"], "--size and --rate: both or none"),
        ([*INTERVAL, "--restart", "soon"], "--restart='soon': must be a duration"),
        (["storage", "--parameters", "8X"], "--parameters='8X': must be a number of parameters such as 350M"),
        (["storage", "--parameters", "8B"], "--parameters: add --strategy (ddp, fsdp, zero3-lora) or --optimizer"),
        (["grace", "--save", "1s"], "give --save, --size and --rate"),
        (["cost", "--gpu-hour", "nan"], "--gpu-hour=nan: must be a number from 0"),
        (["cost", "--interruptions", "-1"], "--interruptions=-1.0: must be a number from 0"),
        (["cost", "--size", "1GB", "--every", "1s"], "--every=1s: must be at least 26 s"),
        (["storage", "--bogus"], "No such option: --bogus"),
        (["weather"], "No such command 'weather'"),
        ([], "Missing command"),
    ],
    ids=" ".join,
)
def test_errors_are_one_line_and_json_where_it_is_asked_for(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("checkpoint-sidecar plan: ")
    assert said in err
    if not arguments:
        return
    assert main(["plan", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    problem = json.loads(out)
    assert (set(problem), problem["exit_code"], err.count("\n")) == ({"error", "exit_code"}, 2, 1)
    assert said in problem["error"]


@pytest.mark.parametrize(("size", "is_told"), [("48", True), ("48.5", True), ("48B", False), ("48GB", False), ("4800", False)])
def test_a_small_number_without_a_unit_is_said_to_be_bytes(
    size: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "storage", "--size", size]) == 0
    told = f"checkpoint-sidecar: --size={size}: the unit is bytes; did you mean {size}MB or {size}GB?\n"
    assert capsys.readouterr().err == (told if is_told else "")


@pytest.mark.parametrize("arguments", [["storage"], ["interval"], ["grace"], ["cost"]], ids=" ".join)
def test_the_help_names_the_formula(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert {"storage": "checkpoint x (keep + 1) x 1.2", "interval": "Daly: sqrt(2CM)", "grace": "1.25 durable + margin"}.get(
        arguments[0], "interruptions x (lost + restart) + stalls"
    ) in text


def test_without_a_sidecar_there_is_nothing_measured(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    monkeypatch.setenv("CKPT_API_PORT", "1")
    assert main(["plan", "storage", "--measured", "--json"]) == 6
    assert "no sidecar answers" in json.loads(capsys.readouterr().out)["error"]


@pytest.fixture
def running(tmp_path: Any) -> Iterator[Sidecar]:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_GRACE_SECONDS": "60"}) as started:
        started.ready()
        yield started


def test_a_running_sidecar_tells_what_it_measured(running: Sidecar) -> None:
    empty = running.command("plan", "storage", "--measured", "--json")
    assert (empty.returncode, json.loads(empty.stdout)["exit_code"]) == (2, 2)
    unknown = running.command("plan", "grace", "--measured")
    assert unknown.returncode == 2
    assert unknown.stderr.count("\n") == 1
    write_checkpoint(running.volume, "checkpoint-5", {"m": b"x" * 3_000_000})
    write_checkpoint(running.volume, "checkpoint-6", {"m": b"x" * 1_000_000})
    running.committed("checkpoint-5")
    running.committed("checkpoint-6")
    sizes = [c["size_bytes"] for c in running.call("GET", "/v1/checkpoints")["checkpoints"]]
    storage = running.command("plan", "storage", "--measured", "--json")
    assert json.loads(storage.stdout)["results"]["checkpoint_bytes"] == max(sizes) >= 3_000_000
    until(lambda: running.status()["at_risk"]["predicted_save_s"] is not None)
    grace = running.command("plan", "grace", "--measured", "--rate", "1MB/s", "--json")
    found = json.loads(grace.stdout)
    assert found["inputs"]["size_bytes"] == max(sizes)
    assert found["inputs"]["bytes_per_s"] == 1_000_000
    assert found["results"]["recommended_s"] >= 4
    assert found["inputs"]["grace_s"] == 60, "the running sidecar's"
    given = running.command("plan", "grace", "--measured", "--rate", "1MB/s", "--grace", "45s", "--json")
    assert json.loads(given.stdout)["inputs"]["grace_s"] == 45
