"""Which node this pod is, which pod, and which settings there are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.outcome import outcome
from trainer_hook import contract
from trainer_hook.contract import ContractError, Node, check_settings, node_from_environment, pod_uid

VARIABLES = ["CKPT_NODE_INDEX", "CKPT_NODE_COUNT", "PET_NODE_RANK", "PET_NNODES", "JOB_COMPLETION_INDEX"]
_values = st.integers(0, 5).map(str) | st.sampled_from(["", " ", "1:4", "2:2", "-1", "1.0", "²", "٣", "10000000000"])
environments = st.dictionaries(st.sampled_from(VARIABLES), _values | st.text(max_size=4))


@given(environments)
def test_any_environment_is_a_node_or_unknown_or_an_error_that_names_the_variable(environ: dict[str, str]) -> None:
    node = outcome(node_from_environment, environ)
    if isinstance(node, ContractError):
        assert any(name in str(node) for name in environ)
    else:
        assert node is None or 0 <= node.index < node.count


@given(environments)
def test_a_pod_takes_itself_for_the_whole_job_only_if_nothing_says_otherwise(environ: dict[str, str]) -> None:
    if outcome(node_from_environment, environ) == Node():
        count = environ.get("CKPT_NODE_COUNT") or environ.get("PET_NNODES") or ""
        numbers = {int(number) for number in count.split(":")} if count else set()
        assert numbers == {1} or not any(environ.get(name) for name in VARIABLES)


@given(strategies.nodes())
def test_explicit_settings_win_over_what_the_launcher_says(node: Node) -> None:
    environ = {
        "CKPT_NODE_INDEX": str(node.index),
        "CKPT_NODE_COUNT": str(node.count),
        "PET_NODE_RANK": "7",
        "PET_NNODES": "9",
        "JOB_COMPLETION_INDEX": "8",
    }
    assert node_from_environment(environ) == node


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, Node(0, 1)),
        ({"CKPT_NODE_INDEX": "", "PET_NNODES": ""}, Node(0, 1)),
        ({"CKPT_NODE_INDEX": "1", "CKPT_NODE_COUNT": "2"}, Node(1, 2)),
        ({"PET_NODE_RANK": "3", "PET_NNODES": "4"}, Node(3, 4)),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1"}, Node(0, 1)),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2:2"}, Node(1, 2)),
        ({"PET_NNODES": "1:1"}, Node(0, 1)),
        ({"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}, Node(1, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "CKPT_NODE_COUNT": "2"}, Node(1, 2)),
        ({"JOB_COMPLETION_INDEX": "3", "CKPT_NODE_COUNT": "1"}, Node(0, 1)),
        ({"CKPT_NODE_COUNT": "1"}, Node(0, 1)),
    ],
)
def test_the_node_is_read_from_the_first_naming_that_is_set(environ: dict[str, str], node: Node) -> None:
    assert node_from_environment(environ) == node


@pytest.mark.parametrize(
    "environ",
    [
        {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"},
        {"PET_NNODES": "2:4"},
        {"CKPT_NODE_INDEX": "0"},
        {"PET_NODE_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"JOB_COMPLETION_INDEX": "2"},
        {"CKPT_NODE_COUNT": "2"},
        {"PET_NNODES": "2"},
    ],
)
def test_one_of_several_without_its_place_is_left_to_the_marker(environ: dict[str, str]) -> None:
    # Taking it for the whole job would commit a part of a checkpoint as all of it.
    assert node_from_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"CKPT_NODE_INDEX": "2", "CKPT_NODE_COUNT": "2"}, "CKPT_NODE_INDEX=2, CKPT_NODE_COUNT=2"),
        ({"CKPT_NODE_INDEX": "5", "CKPT_NODE_COUNT": "1"}, "CKPT_NODE_INDEX=5, CKPT_NODE_COUNT=1"),
        ({"PET_NODE_RANK": "4", "PET_NNODES": "4"}, "PET_NODE_RANK=4, PET_NNODES=4"),
        ({"CKPT_NODE_COUNT": "0"}, "CKPT_NODE_COUNT"),
        ({"CKPT_NODE_COUNT": "1:2"}, "CKPT_NODE_COUNT"),
        ({"CKPT_NODE_COUNT": "two"}, "CKPT_NODE_COUNT"),
        ({"CKPT_NODE_COUNT": "-2"}, "CKPT_NODE_COUNT"),
        ({"CKPT_NODE_INDEX": "first", "CKPT_NODE_COUNT": "2"}, "CKPT_NODE_INDEX"),
        ({"JOB_COMPLETION_INDEX": "٣", "CKPT_NODE_COUNT": "4"}, "JOB_COMPLETION_INDEX"),
    ],
)
def test_a_place_that_cannot_be_names_its_variables(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ContractError, match=re.escape(named)):
        node_from_environment(environ)


@pytest.mark.parametrize(("index", "count"), [(-1, 1), (1, 1), (0, 0), (0, -1), (0, contract.names.MAX_NODES + 1)])
def test_a_node_that_does_not_exist_cannot_be_made(index: int, count: int) -> None:
    with pytest.raises(ContractError):
        Node(index, count)


UID = "0b7c9a52-3f5e-4a30-9a68-6a3f3f0c1d2e"


def test_the_pods_uid_is_read_from_the_mount_of_a_volume() -> None:
    mountinfo = (
        "1 2 0:53 / / rw - overlay overlay rw\n"
        f"3 1 8:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw\n"
    )
    assert pod_uid(mountinfo) == UID


@given(st.text(max_size=200))
def test_outside_kubernetes_there_is_no_uid(mountinfo: str) -> None:
    assert pod_uid(mountinfo) is None


def test_each_side_knows_the_settings_of_the_other_and_shares_some() -> None:
    assert contract.HOOK_SETTINGS & contract.SIDECAR_SETTINGS == contract.environment.SHARED_SETTINGS
    assert contract.KNOWN_SETTINGS == contract.HOOK_SETTINGS | contract.SIDECAR_SETTINGS
    assert all(re.fullmatch(r"CKPT_[A-Z0-9_]+", name) for name in contract.KNOWN_SETTINGS)
    assert not contract.REMOVED_SETTINGS.keys() & contract.KNOWN_SETTINGS


def test_the_systems_files_lie_in_the_systems_directory() -> None:
    places = [
        contract.LEASES,
        contract.TRAINER_STATE,
        contract.TERMINATING,
        contract.REQUEST,
        contract.ANSWER,
        contract.PINS,
        contract.INCOMING,
        contract.JOURNAL,
        contract.TOKEN,
        contract.API_SOCKET,
        contract.EXIT_REPORT,
    ]
    assert len(set(places)) == len(places)
    assert all(place.startswith(".ckpt/") for place in places)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CKPT_STOER", "CKPT_STOER is not a setting: did you mean CKPT_STORE?"),
        ("CKPT_XYZZY_QUX", "no setting has a similar name; remove it"),
        ("CKPT_RESUME_FOREIGN", "is not a setting any more: bring a checkpoint"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_the_next_step(variable: str, message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        check_settings({variable: "1", "PATH": "/bin"})


@pytest.mark.parametrize("value", ["", "0", "false", "Off "])
def test_a_removed_setting_that_is_off_is_ignored(value: str) -> None:
    check_settings({"CKPT_RESUME_FOREIGN": value, "CKPT_STORE": "s3://b/p"})


def test_a_node_is_none_of_its_pods() -> None:
    folder, other = f"/var/lib/kubelet/pods/{UID}/volumes", "/var/lib/kubelet/pods/0b1c2d3e-1111-2222-3333-444455556666/volumes"
    secret = f"46 43 0:39 / {folder}/kubernetes.io~secret/key rw - tmpfs tmpfs rw\n"
    part = f"59 43 254:0 {folder}/kubernetes.io~configmap/c/file {folder}-subpaths/c/0 rw - ext4 /dev/vda rw\n"
    assert pod_uid(secret + part) is None
    assert pod_uid(f"1 2 8:1 {folder}/a /a rw - ext4 /dev/vda rw\n3 2 8:1 {other}/b /b rw - ext4 /dev/vda rw\n") is None
    own = f"3 1 8:1 {folder}/a /checkpoints rw - ext4 /dev/vda rw\n"
    other_pods_of_the_node = f"4 1 0:39 / /host{other}/kubernetes.io~secret/key rw - tmpfs tmpfs rw\n"
    assert pod_uid(own + other_pods_of_the_node) == UID


def test_pods_on_a_node_that_is_itself_a_pod_are_told_apart() -> None:
    outer = "/var/lib/kubelet/pods/0b1c2d3e-1111-2222-3333-444455556666/volumes/kubernetes.io~empty-dir/docker"
    assert pod_uid(f"9 8 0:1 {outer}/volumes/a/_data/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/vda rw") == UID


@pytest.mark.parametrize("text", ["", "-1", "65536", "80.0", "٨٠", "123456"])
def test_a_text_that_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a port from 1 to 65535"):
        contract.environment.port_number(text)
    assert contract.environment.port_number("65535") == 65535
