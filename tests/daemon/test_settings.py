"""sidecar/daemon/settings.py: pure but for looking whether a mounted file is there."""

from __future__ import annotations

import os
import re
import traceback
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.amounts import TOO_MANY_BYTES, amount_bytes
from sidecar.core.lifecycle.phases import LONGEST_GRACE_S
from sidecar.daemon.settings import Settings, from_environment
from sidecar.errors import ConfigurationError
from trainer_hook.contract import HOOK_SETTINGS, KNOWN_SETTINGS, SIDECAR_SETTINGS, Node, check_id

STORE = {"CKPT_STORE": "file:///store"}


def refusal(**environ: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        from_environment(STORE | environ)
    return str(refused.value)


def read(**environ: str) -> Settings:
    return from_environment(STORE | environ)


odd_values = st.text(max_size=12) | st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "1e9",
        "nan",
        "inf",
        "9" * 400,
        "9" * 400 + "TB",
        "200MB/s",
        "true",
        "off",
        "auto",
        "/tmp",
        "s3://b/p",
        "1:2",
    ]
)


@given(st.dictionaries(st.sampled_from(sorted(KNOWN_SETTINGS)), odd_values, max_size=5), st.booleans())
def test_any_environment_is_settings_or_one_line_that_names_a_variable(environ: dict[str, str], with_store: bool) -> None:
    environ = (STORE if with_store else {}) | environ
    try:
        settings = from_environment(environ)
    except ConfigurationError as error:
        said = str(error)
    else:
        assert settings.store
        return
    assert "CKPT_" in said or "node" in said
    assert "pydantic" not in said


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", max_size=20).map("CKPT_".__add__).filter(lambda name: name not in KNOWN_SETTINGS))
def test_a_variable_that_neither_side_knows_is_refused_by_name(name: str) -> None:
    assert refusal(**{name: "1"}).startswith(f"{name} is not a setting")


def test_a_misspelt_variable_is_refused_with_the_nearest_one() -> None:
    assert refusal(CKPT_GRACE_SECOND="30") == "CKPT_GRACE_SECOND is not a setting: did you mean CKPT_GRACE_SECONDS?"


def test_every_setting_of_the_contract_is_a_field_and_the_other_way_round() -> None:
    read_elsewhere = {"CKPT_NODE_INDEX", "CKPT_NODE_COUNT"}
    not_variables = {"node", "pod", "pod_is_unique", "is_first", "endpoint_url", "bucket", "region", "job", "restart"}
    fields = {f"CKPT_{name.upper()}" for name in Settings.model_fields if name not in not_variables}
    assert fields == SIDECAR_SETTINGS - read_elsewhere


def test_the_hooks_settings_may_be_set_in_the_sidecar_too() -> None:
    assert read(**dict.fromkeys(HOOK_SETTINGS - SIDECAR_SETTINGS, "anything")) == read()


def test_a_setting_that_was_removed_is_refused_with_the_way_that_there_is() -> None:
    said = refusal(CKPT_RESUME_FOREIGN="true")
    assert said.startswith("CKPT_RESUME_FOREIGN is not a setting any more: bring a checkpoint of another system")
    assert said.endswith("'checkpoint-sidecar push FOLDER STORE'")
    for off in (" ", "false", "False", "0"):
        assert read(CKPT_RESUME_FOREIGN=off) == read()


def test_only_the_given_mapping_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("CKPT_STORE=s3://file/x\nCKPT_KEEP_LOCAL=7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["checkpoint-sidecar", "--CKPT_KEEP_LOCAL=8", "--keep_local=8"])
    for name, value in {"CKPT_STORE": "s3://process/x", "CKPT_KEEP_LOCAL": "9", "AWS_REGION": "eu-1"}.items():
        monkeypatch.setenv(name, value)
    settings = from_environment(MappingProxyType(STORE))
    assert (settings.store, settings.keep_local, settings.region) == ("file:///store", 2, None)
    with pytest.raises(ConfigurationError, match="CKPT_STORE is not set"):
        from_environment({})


@pytest.mark.parametrize("name", [*Settings.model_fields, "ckpt_keep_local", "Ckpt_Keep_Local", "aws_region"])
def test_a_name_in_other_letters_is_another_name(name: str) -> None:
    assert read(**{name: "7"}) == read()


@pytest.mark.parametrize("text", ["7", "null", "None", "[1]", '{"a": 1}'])
def test_text_stays_text(text: str) -> None:
    settings = read(CKPT_RUN_ID=text, AWS_S3_BUCKET=text)
    assert (settings.run_id, settings.bucket) == (text, text)


@given(odd_values, st.sampled_from(sorted(SIDECAR_SETTINGS - {"CKPT_STORE"})))
def test_what_is_wrong_is_said_without_the_secrets_beside_it(value: str, name: str) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_S3_ENDPOINT": "https://me:hunter2@host",
        "CKPT_STORE": "s3://me:hunter2@b/x",
    }
    said = ""
    try:
        from_environment(secrets | {name: value})
    except ConfigurationError:
        said = traceback.format_exc()
    assert "hunter2" not in said


def test_a_variable_that_is_empty_or_blank_is_not_set() -> None:
    assert read(CKPT_KEEP_STORE="", CKPT_GRACE_SECONDS=" ", CKPT_UNKNOWN="") == read()


def test_without_a_store_the_message_says_what_it_may_be() -> None:
    with pytest.raises(ConfigurationError, match=r"CKPT_STORE is not set: it must be s3://bucket/prefix or file:///path"):
        from_environment({})


UNITS = {
    "": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30, "ti": 2**40, "tib": 2**40,
}  # fmt: skip


@given(
    st.decimals(0, 10**12, places=3) | st.integers(0, 10**18).map(Decimal),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " "]),
    st.sampled_from(["", "/s"]),
    st.booleans(),
)
def test_an_amount_is_its_number_times_its_unit_to_the_byte(
    number: Decimal, unit: str, space: str, per_second: str, upper: bool
) -> None:
    text = f"{number:f}{space}{unit.upper() if upper else unit}{per_second}"
    amount = int(number * UNITS[unit])
    if amount < TOO_MANY_BYTES:
        assert amount_bytes(text) == amount
    else:
        with pytest.raises(ValueError, match="must be less than 8 EiB"):
            amount_bytes(text)


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1e6", "1,5GB", "1.GB", ".5GB", "5 parsecs", "1MB/m", "٣MB", "0x1", "1 2"])
def test_text_that_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be an amount such as"):
        amount_bytes(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CKPT_GRACE_SECONDS", "0"),
        ("CKPT_GRACE_SECONDS", "-1"),
        ("CKPT_GRACE_SECONDS", "nan"),
        ("CKPT_GRACE_SECONDS", "inf"),
        ("CKPT_GRACE_SECONDS", "half a minute"),
        ("CKPT_KEEP_LOCAL", "0"),
        ("CKPT_KEEP_STORE", "0"),
        ("CKPT_KEEP_EVERY_STEPS", "0"),
        ("CKPT_PART_SIZE", "1MB"),
        ("CKPT_PART_SIZE", "6TB"),
        ("CKPT_PART_SIZE", "large"),
        ("CKPT_CONCURRENCY", "0"),
        ("CKPT_CONCURRENCY", "65"),
        ("CKPT_BANDWIDTH_LIMIT", "0"),
        ("CKPT_MIN_FREE", "-5"),
        ("CKPT_MODE", "sidecar"),
        ("CKPT_SPOT", "AWS"),
        ("CKPT_VERIFY", "yes"),
        ("CKPT_SUPERSEDED", "delete"),
        ("CKPT_RESUME", "always"),
        ("CKPT_API_PORT", "65536"),
        ("CKPT_API_PORT", "-1"),
        ("CKPT_API_PORT", "9470.0"),
        ("CKPT_API_PORT", "9_470"),
        ("CKPT_API_PORT", "²"),
        ("CKPT_METRICS_BIND", "0.0.0.0"),
        ("CKPT_METRICS_BIND", "0.0.0.0:http"),
        ("CKPT_METRICS_BIND", "0.0.0.0:²"),
        ("CKPT_METRICS_BIND", "0.0.0.0:65536"),
        ("CKPT_METRICS_BIND", "0.0.0.0:9470"),
        ("CKPT_API_TOKEN", "secret"),
        ("CKPT_LOG", "xml"),
        ("CKPT_SSE", "AES128"),
        ("CKPT_VERIFY_TLS", "perhaps"),
        ("CKPT_DIR", "relative/path"),
        ("CKPT_CREDENTIALS_DIR", "/does/not/exist"),
        ("CKPT_CA_BUNDLE", "/does/not/exist"),
        ("CKPT_NODE_COUNT", "two"),
        ("CKPT_SSE_KMS_KEY_ID", "key"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_it(name: str, value: str) -> None:
    said = refusal(**{name: value})
    assert said.startswith(name)
    assert "\n" not in said


SECONDS = "must be a number above 0 and at most 86400, without a unit"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        *(("CKPT_GRACE_SECONDS", value, SECONDS) for value in ("2m", "30s", "0", "nan", "1e9", "half a minute")),
        ("CKPT_KEEP_LOCAL", "2 checkpoints", "must be a whole number from 1 on"),
        ("CKPT_KEEP_STORE", "0", "must be a whole number from 1 on"),
        ("CKPT_KEEP_EVERY_STEPS", "1.5", "must be a whole number from 1 on"),
        ("CKPT_CONCURRENCY", "65", "must be a whole number from 1 to 64"),
        ("CKPT_CONCURRENCY", "9" * 20, "must be a whole number from 1 to 64"),
        ("CKPT_PART_SIZE", "1MB", "must be an amount such as 200MB, 16Mi or 1.5GiB, from 5Mi to 5Gi"),
        ("CKPT_PART_SIZE", "large", "must be an amount such as 200MB, 16Mi or 1.5GiB, from 5Mi to 5Gi"),
        ("CKPT_BANDWIDTH_LIMIT", "0", "must be an amount such as 200MB, 16Mi or 1.5GiB, above 0"),
        ("CKPT_MIN_FREE", "-5", "must be an amount such as 200MB, 16Mi or 1.5GiB, from 0 on"),
        ("CKPT_API_PORT", "http", "must be a port from 1 to 65535, or 0 for any free one"),
        ("CKPT_METRICS_BIND", "0.0.0.0", "must be host:port, such as 0.0.0.0:9471"),
        ("CKPT_VERIFY_TLS", "perhaps", "must be true or false"),
        ("CKPT_MODE", "sidecar", "must be 'native' or 'classic'"),
    ],
)
def test_a_refusal_names_the_setting_its_value_and_what_it_may_be(name: str, value: str, accepted: str) -> None:
    assert refusal(**{name: value}) == f"{name}={value!r}: {accepted}"


def test_no_setting_is_refused_in_the_words_of_a_library() -> None:
    for name in sorted(SIDECAR_SETTINGS):
        for value in ("\x7f2m", "-1", "[]"):
            said = ""
            try:
                read(**{name: value})
            except ConfigurationError as error:
                said = str(error)
            assert not re.search("(?i)input|parse|valid ", said)


def test_a_grace_period_and_amounts_are_read_with_their_units() -> None:
    settings = read(CKPT_GRACE_SECONDS="120", CKPT_BANDWIDTH_LIMIT="200MB/s", CKPT_PART_SIZE="64Mi", CKPT_MIN_FREE="1.5GiB")
    assert settings.grace_seconds == 120.0
    assert settings.bandwidth_limit == 200_000_000
    assert settings.part_size == 64 << 20
    assert settings.min_free == 3 << 29


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9471", ("127.0.0.1", 9471)),
        ("[::1]:0", ("::1", 0)),
        (":9471", ("0.0.0.0", 9471)),
        ("9471", ("0.0.0.0", 9471)),
    ],
)
def test_metrics_are_served_at_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert read(CKPT_METRICS_BIND=text).metrics_bind == address


def test_the_longest_grace_period_is_what_orphan_uploads_are_spared_for() -> None:
    assert read(CKPT_GRACE_SECONDS=str(LONGEST_GRACE_S)).grace_seconds == LONGEST_GRACE_S
    assert "CKPT_GRACE_SECONDS" in refusal(CKPT_GRACE_SECONDS=str(LONGEST_GRACE_S + 1))


def test_a_kms_key_goes_with_kms_encryption() -> None:
    assert read(CKPT_SSE="aws:kms", CKPT_SSE_KMS_KEY_ID="key").sse_kms_key_id == "key"


def test_the_data_connection_names_fill_in_endpoint_bucket_and_region() -> None:
    settings = read(AWS_S3_ENDPOINT="http://store:9000", AWS_S3_BUCKET="b", AWS_DEFAULT_REGION="eu-1")
    assert (settings.endpoint_url, settings.bucket, settings.region) == ("http://store:9000", "b", "eu-1")


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({"AWS_ENDPOINT_URL": "http://all"}, "http://all"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3"),
        ({"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_S3_ENDPOINT": "http://connection"}, "http://connection"),
    ],
)
def test_the_most_particular_name_of_the_endpoint_wins(environ: dict[str, str], endpoint: str | None) -> None:
    assert read(**environ).endpoint_url == endpoint


def test_a_mounted_secret_wins_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "AWS_S3_BUCKET").write_text("mounted\n")
    settings = read(CKPT_CREDENTIALS_DIR=str(tmp_path), AWS_S3_BUCKET="environment", AWS_DEFAULT_REGION="eu-1")
    assert (settings.bucket, settings.region) == ("mounted", "eu-1")


def test_a_mounted_secret_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    assert refusal(CKPT_CREDENTIALS_DIR="x" * 300).startswith("CKPT_CREDENTIALS_DIR")
    (tmp_path / "AWS_S3_BUCKET").write_bytes(b"\xff")
    assert read(CKPT_CREDENTIALS_DIR=str(tmp_path)).bucket


UID = "0b7c9a52-3f5e-4a30-9a68-6a3f3f0c1d2e"


@given(st.text(max_size=200), st.text(max_size=200))
def test_the_attempt_is_always_safe_as_a_part_of_a_key(hostname: str, uid: str) -> None:
    check_id(from_environment(STORE | {"POD_UID": uid}, hostname=hostname).pod, what="attempt")


def test_the_attempt_is_the_pods_uid_else_the_host_name() -> None:
    mountinfo = f"3 1 8:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw"
    assert from_environment(STORE | {"POD_UID": "from-downward-api"}, mountinfo=mountinfo).pod == "from-downward-api"
    assert from_environment(STORE, mountinfo=mountinfo, hostname="host").pod == UID
    assert from_environment(STORE, hostname="host.local").pod == "host.local"
    assert from_environment(STORE, hostname="_ä").pod == "local"


def test_a_pod_knows_which_restart_of_its_jobset_it_belongs_to() -> None:
    told = {"JOBSET_UID": UID, "JOBSET_RESTART_ATTEMPT": "3"}
    assert from_environment(STORE | told).restart == (3, UID)
    for untold in ({"JOBSET_UID": UID}, {"JOBSET_RESTART_ATTEMPT": "3"}, told | {"JOBSET_RESTART_ATTEMPT": "many"}):
        assert from_environment(STORE | untold).restart is None, "an older JobSet controller does not set the label"


def test_the_node_comes_from_the_environment_and_may_be_left_to_the_marker() -> None:
    assert read().node == Node(0, 1)
    assert read(PET_NODE_RANK="1", PET_NNODES="2").node == Node(1, 2)
    assert read(JOB_COMPLETION_INDEX="1").node is None


def test_settings_cannot_be_changed_after_the_start() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().concurrency = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", ["CKPT_STORE", "CKPT_DIR", "CKPT_CREDENTIALS_DIR", "CKPT_CA_BUNDLE", "CKPT_PART_SIZE"])
def test_a_value_that_is_not_utf_8_is_refused_by_name_alone(name: str) -> None:
    """Python keeps such bytes of the environment as lone surrogates, which no message can hold."""
    assert refusal(**{name: os.fsdecode(b"/certs/\xff")}) == f"{name}: its value is not UTF-8; set it again"
