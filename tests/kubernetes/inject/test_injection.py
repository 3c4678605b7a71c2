from __future__ import annotations

import copy
import io
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from ruamel.yaml import YAML

from sidecar.kubernetes.inject import NotInjectable, Options, inject, inject_text
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import POD, STORE, asked, job, named, several, sidecar_of, values
from tests.deploy.pods import PLAIN, options, workloads
from tests.deploy.schemas import OLD_VERSIONS, VERSIONS, complaints, documents, pod_templates


@examples(max_examples=60)
@given(workloads(), options())
def test_injecting_again_changes_nothing_and_the_argument_is_left_alone(
    document: dict[str, Any], wanted: dict[str, str]
) -> None:
    before = copy.deepcopy(document)
    once = inject(document, with_given(Options(), wanted))
    assert document == before
    again = inject(once.document, with_given(Options(), wanted))
    assert again.document == once.document
    assert once.pods == again.pods == 1


@examples(max_examples=40)
@given(workloads(), options(), st.sampled_from(VERSIONS))
def test_what_comes_out_is_valid_for_every_version_of_kubernetes(
    document: dict[str, Any], wanted: dict[str, str], version: str
) -> None:
    done = inject(document, with_given(Options(), wanted))
    assert complaints(done.document, version) == []


@examples(max_examples=60)
@given(workloads(), options())
def test_what_a_person_wrote_stays_as_it_was(document: dict[str, Any], wanted: dict[str, str]) -> None:
    """All but the trainer's environment, its mounts and the volumes' list is untouched, and those grow or change ours."""
    done = inject(document, with_given(Options(), wanted))
    [old], [new] = pod_templates(document), pod_templates(done.document)
    for key in ("initContainers", "containers"):
        for container in old["spec"].get(key, []):
            now = named(new["spec"][key], container["name"])
            assert {k: v for k, v in now.items() if k not in ("env", "volumeMounts")} == {
                k: v for k, v in container.items() if k not in ("env", "volumeMounts")
            }
            theirs = [entry for entry in container.get("env", []) if not re.match("CKPT_|PYTHONPATH", entry["name"])]
            assert [entry for entry in now.get("env", []) if entry in theirs] == theirs
            assert now.get("volumeMounts", [])[: len(container.get("volumeMounts", []))] == container.get("volumeMounts", [])
    assert new["spec"].get("volumes", [])[: len(old["spec"].get("volumes", []))] == old["spec"].get("volumes", [])


@examples(max_examples=20)
@given(workloads(), options(), st.sampled_from([2, 4]), st.sampled_from([0, 2]), st.integers())
def test_text_keeps_its_lines_and_its_comments_whatever_its_style(
    document: dict[str, Any], wanted: dict[str, str], mapping: int, offset: int, seed: int
) -> None:
    text = _written(document, mapping, offset, random.Random(seed))
    chosen = with_given(Options(), wanted)
    once = inject_text(text, chosen)
    assert documents(once.text) == [inject(document, chosen).document]
    assert inject_text(once.text, chosen).text == once.text
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("# ")]
    # Those at one of our own variables go with it where it moves behind a variable that it names.
    assert sorted(line.strip() for line in once.text.splitlines() if line.strip().startswith("# ")) == sorted(comments)


def _written(document: dict[str, Any], mapping: int, offset: int, chance: random.Random) -> str:
    yaml = YAML(pure=True)
    yaml.indent(mapping=mapping, sequence=2 + offset, offset=offset)
    stream = io.StringIO()
    yaml.dump(json.loads(json.dumps(document)), stream)
    lines = ["# of a person"]
    in_text = False
    for line in stream.getvalue().splitlines():
        in_text = (in_text and not line.strip()) or line.rstrip().endswith(("|-", "|", ">-"))
        if not in_text and re.match(r" *(- )?[A-Za-z]+: ?\S*$", line) and chance.random() < 0.2:
            lines.append(" " * (len(line) - len(line.lstrip())) + f"# {len(lines)}")
        lines.append(line)
    return "\n".join(lines) + "\n"


@examples(max_examples=15)
@given(workloads(), st.integers(), st.sampled_from(["true", "false"]))
def test_no_line_is_lost_however_each_list_is_indented(document: dict[str, Any], seed: int, hook: str) -> None:
    text = "\n".join(_lines(document, random.Random(seed))) + "\n"
    chosen = asked(trainer_container="main", secret="data-connection", install_hook=hook)
    done = inject_text(text, chosen)
    assert documents(done.text) == [inject(document, chosen).document]
    assert inject_text(done.text, chosen).text == done.text
    # What may change: an empty list that grows, and values of ours.
    stays = [line for line in text.splitlines() if not re.search(r"\[\]$|^ *(- )?value: ", line)]
    kept = iter(done.text.splitlines())
    assert [line for line in stays if line not in kept] == []


def _lines(value: Any, chance: random.Random, indent: int = 0) -> list[str]:
    """Lines of a mapping or list, each of which chooses for itself how it is indented."""
    found = []
    for key, entry in value.items() if isinstance(value, dict) else ((None, entry) for entry in value):
        start = " " * indent + ("-" if key is None else f"{key}:")
        if not isinstance(entry, (dict, list)) or not entry:
            found.append(f"{start} {json.dumps(entry, ensure_ascii=False)}")
        elif key is None:
            inner = _lines(entry, chance, indent + 2)
            found += [start, *inner] if chance.random() < 0.1 else [f"{start} {inner[0].lstrip()}", *inner[1:]]
        else:
            found += [start, *_lines(entry, chance, indent + chance.choice((0, 2) if isinstance(entry, list) else (2, 4)))]
    return found


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_every_plain_manifest_gets_valid_sidecars_and_loses_no_line(name: str) -> None:
    given = STORE if name != "runtime" else asked()
    done = inject_text(PLAIN[name], with_given(given, {"install-hook": "true", "secret": "s"}))
    assert done.pods >= 1
    assert inject_text(done.text, with_given(given, {"install-hook": "true", "secret": "s"})).text == done.text
    for document in documents(done.text):
        if document["metadata"]["name"] != "any":  # a patch, not a whole Job
            assert [said for version in VERSIONS for said in complaints(document, version)] == []
    kept = iter(done.text.splitlines())
    lost = [line for line in PLAIN[name].splitlines() if line not in kept and "[]" not in line]
    assert lost == []


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_before_native_sidecars_the_result_is_valid_too(version: str) -> None:
    done = inject_text(PLAIN["job-classic"], with_given(STORE, {"kubernetes-version": version, "install-hook": "true"}))
    [document] = documents(done.text)
    assert complaints(document, version) == []
    pod = document["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["trainer", "checkpoint-sidecar"]
    assert values(sidecar_of(pod))["CKPT_MODE"] == "classic"


CARRIED = """\
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: [{port: 0644}]}}   # left
- apiVersion: batch/v1
  kind: Job
  metadata: {name: one}
  spec: {template: {spec: {containers: [{name: t, image: i}]}}}
- apiVersion: workload.codeflare.dev/v1beta2
  kind: AppWrapper
  metadata: {name: two}
  spec:
    components:
    - template:
        apiVersion: kubeflow.org/v1
        kind: PyTorchJob
        metadata: {name: inner}
        spec:
          pytorchReplicaSpecs:
            Worker: {replicas: 1, template: {spec: {containers: [{name: helper, image: h}, {name: pytorch, image: i}]}}}
"""


def test_lists_and_wrappers_are_looked_into_and_each_run_has_its_own_prefix() -> None:
    done = inject_text(CARRIED, STORE)
    [document] = documents(done.text)
    service, plain, wrapper = document["items"]
    assert service["spec"]["ports"] == [{"port": 644}]
    assert "{port: 0644}" in done.text
    stores = [values(sidecar_of(template["spec"]))["CKPT_STORE"] for template in pod_templates(document)]
    assert stores == ["s3://bucket/runs/one", "s3://bucket/runs/inner"]
    trainers = named(next(iter(pod_templates(wrapper)))["spec"]["containers"], "pytorch")
    assert values(trainers)["CKPT_DIR"] == "/checkpoints"
    assert "podReplacementPolicy" not in plain["spec"]  # fencing parts two pods; Failed would hold up the one that replaces
    paths = {
        warning.path.removeprefix("List: ").rpartition(".spec.template" if "items[1]" in warning.path else ".spec.pytorch")[0]
        for warning in done.warnings
        if "backoffLimit" not in warning.path
    }
    assert paths == {"items[1]", "items[2].spec.components[0].template"}
    assert inject_text(done.text, STORE).text == done.text


def test_documents_without_pods_keep_every_character() -> None:
    other = "--- # first\n# nothing\n---\napiVersion: v1\nkind: ConfigMap\nmetadata:   {name: x}\ndata: {a: ~,  b: yes}\n"
    text = other + "---\n" + PLAIN["job"]
    assert inject_text(text, STORE).text.startswith(other + "---\n# A training")
    assert inject_text(text.replace("\n", "\r\n"), STORE).text == inject_text(text, STORE).text.replace("\n", "\r\n")


def test_a_file_with_other_workloads_is_told_which_one_trains() -> None:
    redis = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "redis"}, "spec": {"template": POD}}
    wrapped = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [redis, job(), {"apiVersion": "x/v1", "kind": "Other", "spec": POD}],
    }
    for only in ("Job", "Job/run", "Pod,Job/run", "job", "job/run"):
        done = inject(wrapped, asked(only=only))
        assert done.pods == 1
        assert done.document["items"] == [redis, inject(job(), asked()).document, wrapped["items"][2]]
    with pytest.raises(NotInjectable, match="--only Job/other: nothing here with pods is that"):
        inject_text(json.dumps(wrapped), asked(only="Job/other"))
    with pytest.raises(
        NotInjectable, match=r"kind Other .x/v1., which is not known: .*--only KIND.* checkpoint-sidecar/inject"
    ):
        inject(wrapped, asked())


def test_a_claim_that_the_workload_makes_is_a_volume() -> None:
    pod = {
        "spec": {"containers": [{"name": "t", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/checkpoints"}]}]}
    }
    claims = [{"metadata": {"name": "data"}, "spec": {}}]
    for document in (
        several("StatefulSet", {"template": pod, "volumeClaimTemplates": claims}),
        several(
            "JobSet",
            {
                "replicatedJobs": [{"name": "a", "template": {"spec": {"template": pod}}}],
                "volumeClaimPolicies": [{"templates": claims}],
            },
        ),
    ):
        [template] = pod_templates(inject(document, STORE).document)
        assert named(sidecar_of(template["spec"])["volumeMounts"], "data")["mountPath"] == "/checkpoints"
        assert [volume["name"] for volume in template["spec"]["volumes"]] == ["checkpoint-sidecar-state"]


MERGED = """\
apiVersion: batch/v1
kind: Job
metadata: {name: run}
spec:
  template:
    metadata: &shared
      labels: {team: ünïcode}
    spec:
      containers:
        - &base
          name: main   # it trains
          image: i
          env: &env
            - {name: A, value: "on"}
          args:
            - |
              first
                --- second   # no comment
        - <<: *base
          name: other
          args: [x]
"""


def test_anchors_and_merge_keys_mean_what_they_meant() -> None:
    """What two containers share by an anchor, such as an environment, they still share: so the other one gets it, too."""
    chosen = asked(trainer_container="main", grace="90")
    done = inject_text(MERGED, chosen)
    [document] = documents(done.text)
    main_, other = document["spec"]["template"]["spec"]["containers"]
    assert values(main_) == values(other) | {"A": "on"}
    assert main_["args"] == ["first\n  --- second   # no comment\n"]
    assert other["args"] == ["x"]
    assert "          name: main   # it trains\n" in done.text
    assert inject_text(done.text, chosen).text == done.text


def test_two_workloads_of_a_file_with_one_prefix_are_told_so() -> None:
    text = "---\n".join([PLAIN["job-classic"], PLAIN["jobset"]])
    said = [warning for warning in inject_text(text, asked(trainer_container="trainer")).warnings if "prefix" in warning.text]
    assert [(warning.path, warning.text[:11]) for warning in said] == [("s3://bucket/run", "2 workloads")]
    own = asked(store="s3://bucket/{name}", trainer_container="trainer")
    renamed = text.replace("name: llama", "name: other", 1)
    assert not [warning for warning in inject_text(renamed, own).warnings if "prefix" in warning.text]
    both = PLAIN["runtime"] + "---\n" + PLAIN["trainjob"]
    assert not [warning for warning in inject_text(both, asked()).warnings if "workloads" in warning.text]


@pytest.mark.parametrize(("run", "is_advised"), [("trainjob", True), ("trainjob-2.1", False)])
def test_a_grace_period_is_advised_only_where_a_run_can_have_one(run: str, is_advised: bool) -> None:
    said = [warning.text for warning in inject_text(PLAIN[run], STORE).warnings if "--grace sets another" in warning.text]
    assert bool(said) == is_advised


def test_json_stays_json() -> None:
    text = json.dumps(job(), indent=4)
    done = inject_text(text, STORE)
    assert json.loads(done.text) == inject(job(), STORE).document
    assert inject_text(done.text, STORE).text == done.text


FLOW = """\
apiVersion: batch/v1
kind: Job
metadata: {name: x}
spec:
  template:
    spec:
      restartPolicy: Never
      volumes: [{name: cm, configMap: {name: c, defaultMode: 0755, optional: no}}]
      containers: [{name: t, image: i, tty: yes, env: [{name: A, value: 'no'}]}]
"""
BRACES = """\
{apiVersion: batch/v1, kind: Job, metadata: {name: x}, spec: {template: {spec: {restartPolicy: Never,
  volumes: [{name: cm, configMap: {name: c, defaultMode: 0755, optional: no}}],
  containers: [{name: t, image: i, tty: yes, env: [{name: A, value: 'no'}]}]}}}}
"""


@pytest.mark.parametrize("text", [FLOW, BRACES])
def test_what_kubernetes_reads_as_another_type_stays_as_written_in_a_line_that_changes(text: str) -> None:
    """``tty: yes`` became the text "yes", which the API refuses, and the octal 0755 of a mode the number 755."""
    done = inject_text(text, STORE).text
    kept = [re.search(rf"\b{name}: ([^,}}]+)", done) for name in ("defaultMode", "optional", "tty")]
    assert [match and match[1] for match in kept] == ["0755", "no", "yes"]
    assert re.search(r"""value: ['"]no['"]""", done)
    assert inject_text(done, STORE).text == done


def test_aliases_that_stand_for_billions_of_values_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
    bomb = "\n".join(["kind: Job", "apiVersion: batch/v1", *lines, "spec: {template: {spec: {containers: *a11}}}"])
    with pytest.raises(NotInjectable, match="its aliases stand for more than 1,000,000 values"):
        inject_text(bomb, Options(store=STORE))
