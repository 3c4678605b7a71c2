"""The command ``checkpoint-sidecar``. What a command needs is imported when it runs: probes must start fast."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sidecar import __version__
from sidecar.client import Client, Refused, Unreachable

if TYPE_CHECKING:
    from sidecar.settings import Settings

EXIT_FAILED, EXIT_CONFIGURATION, EXIT_GIVEN_UP = 1, 2, 3

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (FORMAT.md, "Exit codes")."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser(arguments).parse_args(arguments)
    command: Command = parsed.command
    try:
        return command(parsed)
    except (Unreachable, Refused) as error:
        print(f"checkpoint-sidecar {parsed.name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_FAILED


def _parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoint-sidecar", description="Makes training state durable without touching training code."
    )
    parser.add_argument("--version", action="version", version=f"checkpoint-sidecar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    def add(name: str, command: Command, help_: str, *, as_json: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_)
        if as_json:
            sub.add_argument("--json", action="store_true", help="print the API's answer as JSON")
        sub.set_defaults(command=command)
        return sub

    add("run", _run, "run the sidecar; settings come from the environment", as_json=False)
    add("status", _status, "what is durable, what is on its way, what is at risk").add_argument(
        "--watch", action="store_true", help="print again every second"
    )
    add("ls", _ls, "list checkpoints on the volume and in the store").add_argument("--where", choices=["local", "store"])
    add("show", _show, "show one checkpoint").add_argument("checkpoint")
    resume = add("resume", _resume, "bring a committed checkpoint back to the volume and print its path")
    resume.add_argument("checkpoint", nargs="?", default="latest")
    resume.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    flush = add("flush", _flush, "wait until all that is finished is durable; exit code 3 when it is not in time")
    flush.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS")
    save = add("save", _save, "ask the trainer to save now, and wait until that is durable; exit code 3 when it is not in time")
    save.add_argument("--stop", action="store_true", help="and to end")
    save.add_argument("--no-wait", action="store_true", help="return at once")
    save.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    add("limit", _limit, "change the bandwidth limit of the running sidecar at once").add_argument(
        "rate", help="such as 200MB/s, or none"
    )
    add("drain", _drain, "say that the pod is going; for preStop, returns at once")
    add("probe", _probe, "health probe for exec: exit code 0 or 1", as_json=False).add_argument(
        "--ready", action="store_true", help="also ask whether the store is reachable"
    )
    hook = add("install-hook", _install_hook, "copy the trainer's side into a folder, to be used by PYTHONPATH alone")
    hook.add_argument("folder", metavar="DIR", help="such as a folder on the shared volume")
    inject = add("inject", _inject, "put the sidecar into Kubernetes manifests", as_json=False)
    webhook = add("webhook", _webhook, "serve the same as a mutating admission webhook", as_json=False)
    _add_late(inject, webhook, arguments)
    demo = add("demo", _demo, "a training run loses its pod and its volume, and resumes exactly")
    demo.add_argument("--store", choices=["s3", "file"], default="s3", help="an S3 server in memory, or a folder")
    demo.add_argument("--script", default="examples/train_hf.py", metavar="FILE")
    demo.add_argument("--folder", default=".demo", metavar="DIR", help="emptied first")
    return parser


def _add_late(inject: argparse.ArgumentParser, webhook: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add the many flags of the commands for manifests only where one of them is meant."""
    if arguments[:1] == ["inject"]:
        from sidecar.inject import command

        command.add_arguments(inject)
    elif arguments[:1] == ["webhook"]:
        from sidecar.webhook import command as webhook_command

        webhook_command.add_arguments(webhook)


def _run(_: argparse.Namespace) -> int:
    import asyncio
    import socket
    from pathlib import Path

    from sidecar.errors import ConfigurationError
    from sidecar.settings import from_environment

    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        settings = from_environment(os.environ, mountinfo=mountinfo, hostname=socket.gethostname())
    except ConfigurationError as error:
        print(f"checkpoint-sidecar: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    asyncio.run(_life(settings))
    raise AssertionError("a life ends with the process")


async def _life(settings: Settings) -> NoReturn:
    # Neither the event loop is closed nor the interpreter ended: both wait for every thread, also for one that is inside
    # a request to a dead store or a call to a volume that hangs, and kubelet's patience ends first.
    from sidecar.daemon import Daemon
    from sidecar.errors import ConfigurationError, StoreError
    from sidecar.logging import configure
    from sidecar.store.opening import open_from

    code = EXIT_FAILED
    try:
        configure(settings.log)
        store = open_from(settings)
        code = await Daemon(settings, store).run()
        store.close()
    except (ConfigurationError, StoreError) as error:
        print(f"checkpoint-sidecar: {error}", file=sys.stderr)
        code = EXIT_CONFIGURATION
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _status(options: argparse.Namespace) -> int:
    from sidecar.screens import status_text

    while True:
        status = Client().get("/v1/status")
        _print(options, status, status_text)
        if not options.watch:
            return 0
        time.sleep(1)


def _ls(options: argparse.Namespace) -> int:
    from sidecar.screens import checkpoints_text

    where = f"?where={options.where}" if options.where else ""
    _print(options, Client(timeout_s=60).get(f"/v1/checkpoints{where}"), checkpoints_text)
    return 0


def _show(options: argparse.Namespace) -> int:
    from sidecar.screens import fields_text

    _print(options, Client(timeout_s=60).get(f"/v1/checkpoints/{options.checkpoint}"), fields_text)
    return 0


def _resume(options: argparse.Namespace) -> int:
    from sidecar.screens import resume_text

    client = Client(timeout_s=70)
    answer = client.post("/v1/resume", {"checkpoint": options.checkpoint})
    until_s = time.monotonic() + options.timeout
    while answer["state"] in ("choosing", "downloading") and time.monotonic() < until_s:
        answer = client.get(f"/v1/resume?wait_s={min(20.0, max(0.0, until_s - time.monotonic())):.3f}")
    _print(options, answer, resume_text)
    return 0 if answer["state"] == "ready" else EXIT_FAILED


def _flush(options: argparse.Namespace) -> int:
    client = Client(timeout_s=options.timeout + 10)
    try:
        answer = client.post("/v1/flush", {"timeout_s": options.timeout})
    except Refused as error:
        if error.status != 504:
            raise
        _print(options, error.problem, lambda _: "")
        print(f"checkpoint-sidecar flush: {error}", file=sys.stderr)
        return EXIT_GIVEN_UP
    _print(options, answer, lambda a: f"durable: {', '.join(a['durable']) or 'nothing yet'}")
    return 0


def _save(options: argparse.Namespace) -> int:
    from sidecar.screens import save_text

    client, said = Client(timeout_s=30), ""
    until_s = time.monotonic() + (0 if options.no_wait else options.timeout)
    answer = client.post("/v1/save", {"stop": options.stop})
    while answer["state"] in ("asked", "saved") and (left_s := until_s - time.monotonic()) > 0:
        answer = client.get(f"/v1/save/{answer['id']}?wait_s={min(2.0, left_s):.3f}")
        if answer["state"] != "durable" and save_text(answer) != said:
            said = save_text(answer)
            print(f"checkpoint-sidecar save: {said}", file=sys.stderr, flush=True)
    _print(options, answer, save_text)
    return 0 if options.no_wait or answer["state"] == "durable" else EXIT_GIVEN_UP


def _limit(options: argparse.Namespace) -> int:
    answer = Client().post("/v1/bandwidth", {"limit": None if options.rate == "none" else options.rate})
    _print(options, answer, lambda a: f"limit of all uploads, bytes per second: {a['limit_bytes_per_s'] or 'none'}")
    return 0


def _drain(options: argparse.Namespace) -> int:
    answer = Client(timeout_s=3).post("/v1/drain?source=prestop")
    _print(options, answer, lambda a: f"{a['phase']}; {a['deadline_in_s']} s until the deadline")
    return 0


def _probe(options: argparse.Namespace) -> int:
    Client(timeout_s=4).get("/readyz" if options.ready else "/healthz")
    return 0


def _install_hook(options: argparse.Namespace) -> int:
    from pathlib import Path

    from sidecar.hook_install import NotInstalled, install

    try:
        done = install(Path(options.folder).absolute())
    except NotInstalled as error:
        print(f"checkpoint-sidecar install-hook: {error}", file=sys.stderr)
        return EXIT_FAILED
    answer = {"folder": str(done.folder), "version": done.version, "is_new": done.is_new}
    text = f"{done.folder}: {done.version}{'' if done.is_new else ', as before'}; PYTHONPATH={done.folder} CKPT_HOOK=auto"
    _print(options, answer, lambda _: text)
    return 0


def _inject(options: argparse.Namespace) -> int:
    from sidecar.inject.command import run

    return run(options)


def _webhook(options: argparse.Namespace) -> int:
    from sidecar.webhook.command import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    from pathlib import Path

    from sidecar.demo.scenario import run

    return run(kind=options.store, script=Path(options.script), folder=Path(options.folder).resolve(), as_json=options.json)


def _print(options: argparse.Namespace, answer: Any, text: Callable[[Any], str]) -> None:
    shown = json.dumps(answer) if options.json else text(answer)
    if shown:
        print(shown, flush=True)
