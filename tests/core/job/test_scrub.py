"""A bundle has no secrets in it, and still says what ran."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.job.scrub import HIDDEN, scrubbed_answer, scrubbed_object, scrubbed_text

# Letters that no pattern and no name of the objects below has.
SECRET = "zQ7xV9kJ2wY4"
names = st.from_regex(r"[A-Z][A-Z_]{0,20}", fullmatch=True)


def pod(env: list[dict[str, Any]], **container: Any) -> dict[str, Any]:
    return {"metadata": {"name": "run"}, "spec": {"containers": [{"name": "trainer", "image": "i", "env": env, **container}]}}


@given(names)
def test_the_value_of_a_variable_is_hidden_unless_its_name_is_known_to_be_harmless(name: str) -> None:
    [shown] = scrubbed_object(pod([{"name": name, "value": SECRET}]))["spec"]["containers"][0]["env"]
    harmless = (
        "CKPT_",
        "PET_",
        "NCCL_",
        "TORCH_",
        "JOB_",
        "JOBSET_",
        "LWS_",
        "POD_",
        "AWS_",
        "PYTHON",
        "OMP_NUM_THREADS",
        "HOME",
    )
    assert shown["value"] == HIDDEN or name.startswith(harmless)


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "CKPT_API_TOKEN",
        "DB_URL",
    ],
)
def test_variables_with_credentials_are_hidden(name: str) -> None:
    assert SECRET not in json.dumps(scrubbed_object(pod([{"name": name, "value": SECRET}])))


def test_settings_stay() -> None:
    settings = [
        {"name": "CKPT_STORE", "value": "s3://bucket/run"},
        {"name": "CKPT_CREDENTIALS_DIR", "value": "/var/run/secrets"},
    ]
    assert scrubbed_object(pod(settings))["spec"]["containers"][0]["env"] == settings
    source = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "conn", "key": "k"}}}
    assert scrubbed_object(pod([source]))["spec"]["containers"][0]["env"] == [source], "a reference is no secret"


def test_commands_of_others_and_what_was_applied_last_are_hidden() -> None:
    found = pod([], command=["python", "train.py", f"--hub-token={SECRET}"], args=[SECRET])
    found["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": SECRET,
        "apps.example/last-applied-configuration": SECRET,
        "checkpoint-sidecar/grace": "60",
        "team.example/note": SECRET,
    }
    found["spec"]["trainer"] = {"command": [SECRET], "args": [SECRET], "env": [{"name": "X", "value": SECRET}]}
    found["spec"]["volumes"] = [{"name": "v", "csi": {"volumeAttributes": {"key": SECRET}}}]
    shown = scrubbed_object(found)
    assert SECRET not in json.dumps(shown)
    assert shown["metadata"]["annotations"]["checkpoint-sidecar/grace"] == "60"


def test_the_command_of_the_sidecar_stays() -> None:
    ours = {"name": "checkpoint-sidecar", "image": "i", "command": ["checkpoint-sidecar", "run"], "env": []}
    ours["lifecycle"] = {"preStop": {"exec": {"command": ["checkpoint-sidecar", "drain"]}}}
    assert scrubbed_object(ours) == ours


@pytest.mark.parametrize("name", ["checkpoint-sidecar", "checkpoint-hook"])
def test_a_container_of_ours_is_known_by_its_name_beside_an_image_or_variables(name: str) -> None:
    also: list[dict[str, Any]] = [{"image": "i"}, {"env": []}]
    for more in also:
        ours = {"name": name, "command": ["run"], "args": ["a"], **more}
        assert scrubbed_object(ours) == ours
        assert scrubbed_object(ours | {"name": "other"}) == ours | {"name": "other", "command": HIDDEN, "args": HIDDEN}
    assert scrubbed_object({"name": name, "command": ["run"]})["command"] == HIDDEN, "anything may have that name"
    assert scrubbed_object({"image": "i", "command": ["run"]})["command"] == HIDDEN


@pytest.mark.parametrize("name", ["volumeAttributes", "options", "data", "stringData", "binaryData", "httpHeaders"])
def test_what_may_hold_anything_is_hidden_and_what_the_server_notes_is_left_out(name: str) -> None:
    shown = scrubbed_object({"spec": {name: {"a": SECRET}, "managedFields": [SECRET], "replicas": 2}})
    assert shown == {"spec": {name: HIDDEN, "replicas": 2}}
    assert scrubbed_object({name: 3}) == {name: 3}


def test_an_entry_that_is_no_variable_is_scrubbed_as_any_value() -> None:
    odd = [f"token={SECRET}", {"name": "A", "command": [SECRET]}]
    assert scrubbed_object({"env": odd})["env"] == [f"token={HIDDEN}", {"name": "A", "command": HIDDEN}]
    assert scrubbed_object({"env": [{"value": 1}]})["env"] == [{"name": "None", "value": HIDDEN}]


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"https://user:{SECRET}@proxy.example:3128/",
        f"https://s3/x?X-Amz-Signature={SECRET}&y=1",
        f"password={SECRET}",
        f'"aws_secret_access_key": "{SECRET}/+="',
        f"HF_TOKEN: {SECRET}",
        f"hf_{SECRET}{SECRET}",
        f"eyJ{SECRET}.{SECRET}.{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
    ],
)
def test_credentials_in_text_are_hidden(text: str) -> None:
    assert SECRET not in scrubbed_text(f"before {text} after")
    assert scrubbed_text(f"before {text}").startswith("before ")


def test_an_access_key_in_a_log_line_is_hidden() -> None:
    assert "AKIA" not in scrubbed_text("denied for AKIAABCDEFGHIJKLMNOP, try again")


@pytest.mark.parametrize("written", ["token='ab'{}", 'password="ab"{}', "api_key=ab'{}'", "token=\"{}\"'ab'"])
def test_a_value_in_several_quotes_is_hidden_as_a_whole(written: str) -> None:
    assert SECRET not in scrubbed_text(f"export {written.format(SECRET)} PATH=/bin")
    assert scrubbed_text(f"export {written.format(SECRET)} PATH=/bin").endswith(" PATH=/bin")


def test_an_ordinary_log_line_stays() -> None:
    line = '{"event": "checkpoint_committed", "step": 40, "store": "s3://bucket/runs/llama", "upload_s": 3.1}'
    assert scrubbed_text(line) == line


@given(st.text(max_size=200) | st.from_regex(r"(token|password|bearer|://a:b@|x-amz-signature)[=: ]{1,2}[a-z\"'()]{0,12}"))
@example("TOKEN:''0")
def test_scrubbing_twice_changes_nothing(text: str) -> None:
    once = scrubbed_text(text)
    assert scrubbed_text(once) == once


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda b: (
            st.lists(b, max_size=3)
            | st.dictionaries(st.sampled_from(["env", "name", "args", "annotations", "spec", "data", "value"]), b, max_size=4)
        ),
    )
)
def test_any_document_is_scrubbed_without_an_error(document: Any) -> None:
    json.dumps(scrubbed_object(document))


def test_an_answer_keeps_its_form_and_hides_credentials_in_its_texts() -> None:
    answer = {"token_required": False, "secret": 5, "reasons": [f"https://u:{SECRET}@proxy refused"], "step": None}
    shown = scrubbed_answer(answer)
    assert shown == answer | {"reasons": [f"https://{HIDDEN}@proxy refused"]}
