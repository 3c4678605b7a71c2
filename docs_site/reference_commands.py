"""The references of the command line, of labels and annotations, and of exit codes, made of the code."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import typer

from sidecar.cli.app import COMMANDS, application
from sidecar.core.job import workloads
from sidecar.core.lifecycle import exit_codes
from sidecar.kubectl.app import app as kubectl_app
from sidecar.kubernetes.inject import identity, injection, recalled, trainer, workload
from sidecar.kubernetes.inject.options import ANNOTATION, DEFAULT_IMAGE, ENVIRONMENT, FLAGS, LABEL
from trainer_hook.contract import PREEMPTED_EXIT_CODE

MADE = "This page is made of the code: `make reference`.\n"
_PROGRAM, _KUBECTL = "checkpoint-sidecar", "kubectl ckpt"


def all_commands() -> dict[str, Any]:
    """Return every command by its words, such as ``checkpoint-sidecar plan grace``."""
    found = dict(_below(_PROGRAM, typer.main.get_command(application("")), [*COMMANDS]))
    return found | dict(_below(_KUBECTL, typer.main.get_command(kubectl_app), []))


def options_of(command: Any) -> set[str]:
    """Return all names of a command's options, with their dashes."""
    named = {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")}
    return named | {"-h", "--help"}


def commands_page() -> str:
    """Return docs/reference/cli.md."""
    text = (
        "# Commands\n\nEvery command and option. What they are for, with examples: [the command line](../commands.md) and\n"
        "[kubectl ckpt](../kubectl.md). Exit codes are on [their own page](exit-codes.md).\n" + MADE
    )
    for words, command in all_commands().items():
        if hasattr(command, "commands") or words == f"{_PROGRAM} inject":
            continue
        text += _command(words, command)
    return text + (
        f"\n## {_PROGRAM} inject\n\n{_described(all_commands()[f'{_PROGRAM} inject'])}\n\n"
        "Its options are on the page of [labels and annotations](annotations.md#options-of-an-injection), because the "
        "webhook has the same. Besides them:\n\n"
        + _table(p for p in all_commands()[f"{_PROGRAM} inject"].params if p.name not in _flag_names())
    )


def annotations_page() -> str:
    """Return docs/reference/annotations.md."""
    rows = ""
    for flag in FLAGS:
        given = f"`--{flag.name}`" if flag.metavar is None else f"`--{flag.name} {flag.metavar}`".replace("|", "\\|")
        variable = f"`{ENVIRONMENT}{flag.field.upper()}`"
        rows += f"| {given} | `{ANNOTATION}{flag.name}` | {variable} | {flag.text} |\n"
    read = "".join(f"| `{name}` | {where} | {text} |\n" for name, where, text in _READ)
    written = "".join(f"| `{name}` | {where} | {text} |\n" for name, where, text in _WRITTEN)
    return (
        "# Labels and annotations\n\n"
        "What `checkpoint-sidecar inject` and the [webhook](../../OPERATIONS.md#into-a-cluster) read and write.\n"
        f"{MADE}\n## Options of an injection\n\n"
        "The same option is a flag of `inject`, an annotation of a pod that the webhook sees, and a variable of the webhook's\n"
        "own environment, which is the default for all pods. Switches take `true` or `false` in annotations and variables.\n"
        "Other [settings](../settings.md) are given by `inject --set CKPT_NAME=VALUE`, by the annotation\n"
        f"`{ANNOTATION}CKPT_NAME`, or by a variable of that name in the webhook's environment. The default image is\n"
        f"`{DEFAULT_IMAGE}`.\n\n"
        "| flag | annotation of the pod | variable of the webhook | meaning |\n| --- | --- | --- | --- |\n"
        + rows
        + "\n## Read\n\n"
        "| name | on | meaning |\n| --- | --- | --- |\n" + read + "\n## Written\n\n"
        "| name | on | meaning |\n| --- | --- | --- |\n" + written
    )


_READ = (
    (LABEL, "pod", "label; the webhook adds the sidecar where it is `true`"),
    (f"{ANNOTATION}…", "pod", "annotation; an option of the injection, see above. One that is no option is an error"),
    (trainer._DEFAULT_CONTAINER, "pod template", "annotation; the container that trains, where several could"),
    (workload._JOBSET_LABEL, "pod", "label of JobSet (also under Kubeflow's TrainJob); names the run"),
    (workload.JOB_LABEL, "pod", "label of the Job controller; names the run. `job-name` before Kubernetes 1.27"),
    (workload._KUBEFLOW_LABEL, "pod", "label of Kubeflow's training operator; names the run"),
    (workload.RAY_ORIGIN, "pod", "label; names the RayJob or RayService of a worker"),
    (workload._RAY_CLUSTER, "pod", "label of KubeRay; names the cluster"),
    (workload._LWS_NAME, "pod", f"label of LeaderWorkerSet; names the run, with `{workload._LWS_GROUP}`"),
    (workload._VOLCANO_LABEL, "pod", "label of Volcano; names the run"),
    (workload._POD_GROUP, "pod", "label of Kueue's pod groups; names the run"),
    (workload._RELEASE, "workload", "label; the release of a Helm chart, where a template has no name of its own"),
    (identity._COMPLETION_INDEX.split("'")[1], "pod", "annotation of an indexed Job; the index of the node"),
    (identity._JOB_INDEX.split("'")[1], "pod", "label of JobSet; index of a Job among those of one replicated job"),
    *(
        (name, "Job", "annotation; the Job may start with fewer pods, so no number of nodes is written")
        for name in identity._STARTED_WITH_FEWER
    ),
    (identity._FEWER_INDICES, "Job", "annotation; must be `true` with partial admission"),
    (workloads._QUEUE_LABEL, "workload", "label of Kueue; `kubectl ckpt pause` refuses such a job"),
)
_WRITTEN = (
    (injection.INJECTED, "pod template", "label; `true` on each pod with the sidecar. The PodMonitor selects by it"),
    (trainer.TRAINER_ANNOTATION, "pod template", "annotation; the container that was taken for the trainer"),
    (recalled._USER_ANNOTATION, "pod template", "annotation; the user of `--run-as-user`"),
    (recalled.PODS_ANNOTATION, "workload", "annotation; the pods of `--pods`"),
    (recalled.SKIP_CONTAINERS, "pod template", "annotation of EKS with `--cloud-identity`; the containers without the role"),
)


def exit_codes_page() -> str:
    """Return docs/reference/exit-codes.md."""
    docs = _constants(inspect.getsource(exit_codes))
    by_code = sorted((int(getattr(exit_codes, name)), text) for name, text in docs.items())
    rows = "".join(f"| {code} | {text} |\n" for code, text in by_code)
    return f"""# Exit codes

{MADE}
## Sidecar and commands

The sidecar (`checkpoint-sidecar run`) ends with 0 to 4, a command with any of them but 4; [what they mean for single
commands](../commands.md#exit-codes-of-the-commands).

| code | meaning |
| --- | --- |
{rows}
`checkpoint-sidecar probe` has 0 and 1 alone. [`kubectl ckpt`](../kubectl.md#exit-codes) has the same numbers.

## Trainer under the hook

| code | meaning |
| --- | --- |
| 0 | success |
| 2 | a setting is wrong; one line on standard error names it |
| {PREEMPTED_EXIT_CODE} | preempted, after a just-in-time save (`CKPT_PREEMPTED_EXIT_CODE`) |
| other | the script's own |

`torchrun` under the hook ends with {PREEMPTED_EXIT_CODE}, too, if it got SIGTERM or if all failed ranks were
preempted. 137 is the kernel's or the kubelet's: killed, by SIGKILL after the grace period or for its memory.
The contract is in [FORMAT.md](../../FORMAT.md#exit-codes).
"""


def _constants(source: str) -> dict[str, str]:
    body = ast.parse(source).body
    found = {}
    for assigned, text in pairwise(body):
        if isinstance(assigned, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(assigned.targets[0])] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def _below(words: str, command: Any, order: list[str]) -> Iterator[tuple[str, Any]]:
    yield words, command
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    for name in [*order, *(name for name in subcommands if name not in order)]:
        yield from _below(f"{words} {name}", subcommands[name], [])


def _value(option: Any) -> str:
    """Return how an option's value is written, such as ``DURATION`` or ``local|store``."""
    kinds = [option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation)]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    return str(option.metavar or "|".join(choices) or ("NUMBER" if float in kinds else "N" if int in kinds else "TEXT"))


def _flag_names() -> set[str | None]:
    return {flag.field for flag in FLAGS}


def _command(words: str, command: Any) -> str:
    usage = " ".join([words, *(_argument(each) for each in _arguments(command)), "[OPTIONS]"])
    return f"\n## {words}\n\n{_described(command)}\n\n```text\n{usage}\n```\n\n" + _table(command.params)


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def _argument(each: Any) -> str:
    name = str(each.metavar or each.name or "").upper().strip("[]")
    dots = "…" if each.nargs == -1 else ""
    return f"{name}{dots}" if each.required else f"[{name}]{dots}"


def _described(command: Any) -> str:
    return " ".join((command.help or "").split()).replace("``", "`")


def _table(params: Iterable[Any]) -> str:
    rows = ""
    for each in params:
        text = " ".join(str(getattr(each, "help", "") or "").split()).replace("|", "\\|")
        if each.param_type_name == "argument":
            rows += f"| `{_argument(each)}` | {text} | {'required' if each.required else ''} |\n"
            continue
        names = ", ".join([*each.opts, *each.secondary_opts])
        value = "" if getattr(each, "is_flag", False) else f" {_value(each)}".replace("|", "\\|")
        is_said = each.default is None or isinstance(each.default, bool) or callable(each.default) or not each.show_default
        default = ("required" if each.required else "") if is_said else f"`{each.default}`"
        rows += f"| `{names}{value}` | {text} | {default} |\n"
    return "| option | meaning | default |\n| --- | --- | --- |\n" + rows if rows else ""
