"""Termination notices and leases, with real processes and signals."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.volume.volume import Volume
from tests.hook.job import ROOT, plain_environ
from tests.process.sidecar_process import until
from tests.processes import state_of
from trainer_hook.contract import Notice, RequestFile, encode_notice, encode_request, parse_answer, parse_notice, rfc3339
from trainer_hook.process.save_requests import SaveRequests
from trainer_hook.process.signals import StopSignal, process_start_s
from trainer_hook.volume import lease

START = """
import os, signal, sys, threading, time
from pathlib import Path
from trainer_hook.process import signals
from trainer_hook.process.signals import StopSignal
volume = Path(sys.argv[1])
(volume / ".ckpt").mkdir(exist_ok=True)
stop = StopSignal(volume, exit_code=143)
"""


def child(code: str, volume: Path) -> subprocess.Popen[str]:
    """Run Python with a ``StopSignal`` called ``stop``."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START + code, str(volume)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(code: str, volume: Path, *, signalled: bool = False, timeout_s: float = 60) -> tuple[int, str]:
    """Return exit code and output; with ``signalled``, SIGTERM is sent when the first line is out."""
    with child(code, volume) as process:
        first = ""
        if signalled:
            assert process.stdout
            first = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        try:
            rest, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, first + rest


def test_outside_training_a_signal_ends_the_process_as_preempted(volume: Path) -> None:
    code = "stop.install()\nprint('up', flush=True)\ntime.sleep(30)\n"
    assert outcome(code, volume, signalled=True) == (143, "up\n")
    assert parse_notice((volume / ".ckpt/terminating").read_bytes()).source == "sigterm"


SLOW_THREADS = """
from trainer_hook.process import signals
publish = signals.publish
def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(3)
    publish(*arguments)
signals.publish = slow
"""


def test_the_process_does_not_end_before_the_volume_knows(volume: Path) -> None:
    code = SLOW_THREADS + "stop.install()\nprint('up', flush=True)\ntime.sleep(30)\n"
    assert outcome(code, volume, signalled=True) == (143, "up\n")
    assert (volume / ".ckpt/terminating").exists()


WAITS = """
with stop.training():
    print('up', flush=True)
    until = time.monotonic() + 5
    while not stop.noticed() and time.monotonic() < until:
        time.sleep(0.01)
    print('told', stop.noticed(), flush=True)
"""


def test_while_training_it_only_raises_the_flag(volume: Path) -> None:
    assert outcome("stop.install()\n" + WAITS, volume, signalled=True) == (0, "up\ntold True\n")


def test_the_handler_that_was_there_before_runs_too(volume: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda number, frame: print('theirs', number))\nstop.install()\n" + WAITS
    assert outcome(code, volume, signalled=True) == (0, "up\ntheirs 15\ntold True\n")


def test_a_handler_that_was_there_before_and_exits_does_not_cut_the_save_short(volume: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))\nstop.install()\n" + WAITS
    assert outcome(code, volume, signalled=True) == (0, "up\ntold True\n")


def test_a_handler_put_over_ours_does_not_hide_the_signal(volume: Path) -> None:
    code = "stop.install()\nsignal.signal(signal.SIGTERM, lambda number, frame: print('theirs'))\n" + WAITS
    assert outcome(code, volume, signalled=True) == (0, "up\ntheirs\ntold True\n")


def test_many_signals_in_a_row_are_one_notice(volume: Path) -> None:
    code = "stop.install()\nstop.is_training = True\nfor _ in range(500):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "print('told', stop.noticed())\n"
    assert outcome(code, volume) == (0, "told True\n")


@pytest.mark.parametrize(
    "over", ["", *(f"signal.signal(signal.SIGTERM, lambda *_: {name}(5))\n" for name in ("os._exit", "sys.exit"))]
)
def test_forked_children_are_ended_by_sigterm_at_any_moment_and_their_parent_is_not_told(over: str, volume: Path) -> None:
    # Python alone drops what a child gets in its first moment, where a handler is set, and the parent waits for ever.
    codes = {5, 1} if "sys.exit" in over else {5} if over else {-15}  # 1: multiprocessing's, before it runs the function
    code = f"""
stop.install()
{over}
import multiprocessing
def compute():
    while True:
        time.sleep(0.01)
with stop.training():
    for moment_s in 10 * [0.0] + [0.001, 0.1]:
        child = multiprocessing.get_context("fork").Process(target=compute)
        child.start()
        time.sleep(moment_s)
        child.terminate()
        child.join()
        assert child.exitcode in {codes}, child.exitcode
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    time.sleep(0.2)
    print('told', stop.noticed())
"""
    assert outcome(code, volume) == (0, "told False\n")


def test_a_pool_that_is_ended_ends(volume: Path) -> None:
    code = """
stop.install()
import multiprocessing
with stop.training():
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, range(4))
    pool.terminate()
    pool.join()
    print('told', stop.noticed())
"""
    assert outcome(code, volume) == (0, "told False\n")


DEEP_IN_C = """
def watch():
    while stop.notice_at_s is None:
        time.sleep(0.01)
    print('told', flush=True)
    os._exit(0)
threading.Thread(target=watch).start()
print('up', flush=True)
import hashlib
hashlib.pbkdf2_hmac('sha256', b'x', b'y', 50_000_000)
"""


def test_a_thread_notices_while_the_main_thread_is_deep_in_c(volume: Path) -> None:
    code = "stop.install()\nstop.is_training = True\n" + DEEP_IN_C
    began_s = time.monotonic()
    assert outcome(code, volume, signalled=True) == (0, "up\ntold\n")
    assert time.monotonic() - began_s < 10, "the computation needs longer"


def test_a_thread_notices_also_after_an_event_loop_of_the_script(volume: Path) -> None:
    """A loop with signal handlers takes the descriptor, and leaves none when it is closed."""
    code = """
stop.install()
import asyncio
async def serve():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.remove_signal_handler(signal.SIGUSR1)
asyncio.run(serve())
assert signal.set_wakeup_fd(-1) == -1
stop.defer()
"""
    code += DEEP_IN_C
    assert outcome(code, volume, signalled=True) == (0, "up\ntold\n")


def test_an_event_loop_that_came_first_keeps_its_descriptor(volume: Path) -> None:
    code = "import socket\na, b = socket.socketpair()\nb.setblocking(False)\nsignal.set_wakeup_fd(b.fileno())\nstop.install()\n"
    code += "assert signal.set_wakeup_fd(-1) == b.fileno()" + WAITS
    assert outcome(code, volume, signalled=True) == (0, "up\ntold True\n")


def test_a_callback_that_fails_does_not_cost_the_notice(volume: Path) -> None:
    stop = StopSignal(volume, exit_code=143)

    def fail() -> None:
        raise RuntimeError

    stop.on_notice = fail
    (volume / ".ckpt").mkdir()
    with pytest.raises(RuntimeError):
        stop._notice_signal()
    assert parse_notice((volume / ".ckpt/terminating").read_bytes()).source == "sigterm"


def notice(volume: Path, content: bytes) -> None:
    (volume / ".ckpt").mkdir(exist_ok=True)
    (volume / ".ckpt/terminating").write_bytes(content)


def test_the_file_on_the_volume_counts_as_a_notice(volume: Path) -> None:
    stop = StopSignal(volume, exit_code=143)
    assert not stop.noticed()
    notice(volume, encode_notice(Notice(rfc3339(time.time()), "prestop")))
    until(stop.noticed)


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"])
def test_a_notice_without_a_time_counts_by_when_it_was_written(content: bytes, volume: Path) -> None:
    notice(volume, content)
    assert StopSignal(volume, exit_code=143).noticed()
    os.utime(volume / ".ckpt/terminating", (0, process_start_s() - 5))
    assert not StopSignal(volume, exit_code=143).noticed()


def test_a_notice_that_was_for_an_earlier_process_is_ignored(volume: Path) -> None:
    notice(volume, encode_notice(Notice(rfc3339(process_start_s() - 1), "sigterm")))
    assert not StopSignal(volume, exit_code=143).noticed()


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_notice_that_was_not_there_before_counts_after_the_clock_was_set_back(volume: Path, is_mounted: bool) -> None:
    if is_mounted:
        (volume / ".ckpt").mkdir()
    stop = StopSignal(volume, exit_code=143)
    stop._polled_s = -1.0
    assert not stop.noticed()
    notice(volume, encode_notice(Notice(rfc3339(process_start_s() - 3600), "spot")))
    stop._polled_s = -1.0
    assert stop.noticed() is is_mounted, "an old notice on a volume that was away is not new"


def test_a_notice_given_while_libraries_were_still_being_imported_counts(volume: Path) -> None:
    notice(volume, encode_notice(Notice(rfc3339(process_start_s() + 0.5), "prestop")))
    assert StopSignal(volume, exit_code=143).noticed()


def test_a_process_knows_when_it_was_started(volume: Path) -> None:
    before_s = time.time()
    code = "from trainer_hook.process.signals import process_start_s\n"
    code += "print(time.time())\ntime.sleep(0.3)\nprint(process_start_s())"
    running_s, started_s = map(float, outcome(code, volume)[1].split())
    assert before_s - 0.05 < started_s < running_s


def test_looking_at_the_volume_at_each_step_costs_next_to_nothing(volume: Path) -> None:
    stop, requests = StopSignal(volume, exit_code=143), SaveRequests(volume)
    began_s = time.perf_counter()
    for _ in range(10_000):
        stop.noticed()
        requests.poll()
    per_step_s = (time.perf_counter() - began_s) / 10_000
    print(f"{1e6 * per_step_s:.2f} us per step")
    assert per_step_s < 50e-6


def test_a_request_is_seen_once_and_one_from_before_never(volume: Path) -> None:
    path = volume / ".ckpt/request.json"
    path.parent.mkdir()
    path.write_bytes(encode_request(RequestFile("1", "save")))
    requests = SaveRequests(volume)
    assert requests.poll() is None
    path.write_bytes(encode_request(RequestFile("2", "save-and-stop")))
    assert until(requests.poll) == RequestFile("2", "save-and-stop")
    requests._polled_s = 0
    assert requests.poll() is None
    path.write_bytes(b"{half")
    requests._polled_s = 0
    assert requests.poll() is None


def test_a_request_is_answered_once_by_the_save_that_follows_it(volume: Path) -> None:
    (volume / ".ckpt").mkdir()
    requests = SaveRequests(volume)
    answer = volume / ".ckpt/answer.json"
    requests.answer("checkpoint-1", saved=True)
    assert not answer.exists(), "nobody asked"
    (volume / ".ckpt/request.json").write_bytes(encode_request(RequestFile("1", "save")))
    assert requests.take() == RequestFile("1", "save")
    assert requests.take() is None
    requests.answer("checkpoint-2", saved=True)
    said = parse_answer(answer.read_bytes())
    assert (said.id, said.outcome, said.checkpoint) == ("1", "saved", "checkpoint-2")
    requests.answer("checkpoint-3", saved=True)
    assert parse_answer(answer.read_bytes()) == said
    (volume / ".ckpt/request.json").write_bytes(encode_request(RequestFile("2", "save")))
    requests.take()
    requests.answer("checkpoint-3", saved=False)
    said = parse_answer(answer.read_bytes())
    assert (said.id, said.outcome, said.checkpoint) == ("2", "failed", None)
    assert said.reason


HOLDS = """
from trainer_hook.volume import lease
print('held', lease.hold(volume, 0), lease.hold(volume, 0), flush=True)
"""


def is_free(volume: Path) -> bool:
    """Ask as the sidecar does."""
    return Volume(volume).held_leases() == 0


def test_asking_for_a_lease_never_locks_it(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a trainer that takes its lease at this instant would be refused")

    with child(HOLDS + "time.sleep(30)", volume) as process:
        assert process.stdout
        assert process.stdout.readline() == "held True True\n"
        monkeypatch.setattr(fcntl, "lockf", refuse)
        monkeypatch.setattr(fcntl, "flock", refuse)
        assert Volume(volume).held_leases() == 1
        process.kill()
        process.wait()
        assert Volume(volume).held_leases() == 0


def test_a_lease_is_held_while_its_process_lives_and_free_after_kill_9(volume: Path) -> None:
    with child(HOLDS + "time.sleep(30)", volume) as process:
        assert process.stdout
        assert process.stdout.readline() == "held True True\n"
        assert not is_free(volume)
        assert outcome(HOLDS, volume) == (0, "held False False\n"), "a second process does not get it"
        assert not is_free(volume)
        process.kill()
        process.wait()
        assert is_free(volume)


def test_a_lease_that_is_only_locked_for_an_instant_is_taken_after_it(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = fcntl.lockf, [BlockingIOError(), BlockingIOError()]

    def lock(fd: int, how: int) -> None:
        if refusals:
            raise refusals.pop()
        real(fd, how)

    monkeypatch.setattr(fcntl, "lockf", lock)
    monkeypatch.setattr(lease, "_held", {})
    assert lease.hold(volume, 0)
    assert refusals == []


def test_a_forked_child_that_outlives_the_process_does_not_keep_the_lease(volume: Path) -> None:
    code = HOLDS + "pid = os.fork()\nif pid == 0:\n    time.sleep(30)\nprint(pid, flush=True)\ntime.sleep(30)"
    with child(code, volume) as process:
        assert process.stdout
        assert process.stdout.readline() == "held True True\n"
        orphan = int(process.stdout.readline())
        try:
            assert not is_free(volume)
            process.kill()
            process.wait()
            until(lambda: is_free(volume))
            assert state_of(orphan)
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_parent_waits_for_the_ranks_that_it_started(volume: Path) -> None:
    code = """
import multiprocessing
from trainer_hook.process import signals as jit
jit._IDLE_EXIT_S = 0.2
def rank():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)
    print('saved', flush=True)
stop.install()
child = multiprocessing.get_context("fork").Process(target=rank)
child.start()
print('up', flush=True)
child.join()
"""
    assert outcome(code, volume, signalled=True) == (143, "up\nsaved\n")
