from __future__ import annotations

import io
from pathlib import Path

import pytest

from sidecar.cli.main import main
from sidecar.kubernetes.inject import Options, inject_text
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import STORE
from tests.deploy.pods import PLAIN


def test_the_command_prints_the_difference_writes_in_place_and_says_what_bites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PLAIN["job"])
    chosen = ["--store", "s3://bucket/{name}", "--grace", "90", "--save-steps", "5", "--jit", "true"]
    chosen += ["--set", "CKPT_KEEP_STORE=4"]
    assert main(["inject", "-f", str(place), "--diff", *chosen]) == 0
    out, err = capsys.readouterr()
    assert "+      terminationGracePeriodSeconds: 90" in out.splitlines()
    assert not [line for line in out.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert f"warning: {place}: Job/llama: spec.template.spec.containers[0]: nothing here starts the hook" in err
    assert main(["inject", "-f", str(place), "-i", *chosen]) == 0
    once = place.read_text()
    assert main(["inject", "-f", str(place), "-i", *chosen]) == 0
    assert place.read_text() == once == inject_text(PLAIN["job"], with_given(Options(), _given(chosen))).text
    assert capsys.readouterr().out == ""


def test_what_is_said_of_several_replicas_is_printed_once_with_all_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PLAIN["pytorchjob"])
    assert main(["inject", "-f", str(place), "--store", "s3://bucket/{name}", "--diff"]) == 0
    lines = capsys.readouterr().err.splitlines()
    [line] = [line for line in lines if "30 s from SIGTERM" in line]
    specs = "PyTorchJob/llama: spec.pytorchReplicaSpecs"
    grace = "template.spec.terminationGracePeriodSeconds"
    assert f"{specs}.Master.{grace}, {specs}.Worker.{grace}: is not set" in line
    assert len(lines) == len({line.rpartition(": ")[2] for line in lines})


def _given(arguments: list[str]) -> dict[str, str]:
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return dict(value.split("=") if name == "--set" else (name[2:], value) for name, value in pairs)


def test_standard_input_goes_to_standard_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PLAIN["jobset"]))
    assert main(["inject", "-f", "-", "--store", "s3://bucket/runs/{name}"]) == 0
    assert capsys.readouterr().out == inject_text(PLAIN["jobset"], STORE).text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--store", "ftp://x"], 2, "must be s3://bucket/prefix"),
        (["--set", "KEEP=1"], 2, "must be CKPT_NAME=VALUE"),
        (["--set", "CKPT_VERIFY=maybe"], 2, "CKPT_VERIFY='maybe'"),
        (["--set", "CKPT_RESUME_FOREIGN=true"], 2, "CKPT_RESUME_FOREIGN is not a setting any more"),
        (
            ["--store", "s3://bucket/x", "--trainer-container", "nobody"],
            1,
            "job.yaml: spec.template: no pod has a container 'nobody'",
        ),
    ],
)
def test_a_refusal_writes_nothing(
    arguments: list[str], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PLAIN["job"])
    assert main(["inject", "-i", "-f", str(place), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text in err
    assert place.read_text() == PLAIN["job"]
