"""The hook that ``install-hook`` leaves on a volume: complete, readable for every user, harmless to every interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.volume.hook_install import NotInstalled, install
from tests.hook.activation.test_injection import USES_IT, fake_transformers, median_s, python
from tests.hook.job import ROOT, Answers, finished, plain_environ, script, training
from trainer_hook import CURRENT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return install(tmp_path / "hook").folder


def test_a_container_with_nothing_but_the_folder_is_hooked(folder: Path, tmp_path: Path) -> None:
    code = USES_IT + "; import trainer_hook; print(trainer_hook.__file__)"
    ended = python(code, path=(folder, fake_transformers(tmp_path)), CKPT_DIR=str(tmp_path))
    assert ended.stdout == f"True\n{(folder / CURRENT).resolve()}/trainer_hook/__init__.py\n", ended.stderr
    assert ended.stderr == ""


def test_again_it_changes_nothing(folder: Path) -> None:
    def seen() -> dict[str, tuple[int, int]]:
        return {str(p): (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in folder.rglob("*")}

    before = seen()
    assert not install(folder).is_new
    assert seen() == before


def test_another_version_takes_over_whole_and_leaves_the_old_one_to_those_who_run_it(folder: Path) -> None:
    old = folder / (folder / CURRENT).readlink()
    (folder / CURRENT).unlink()
    (folder / CURRENT).symlink_to(old.rename(folder / "trainer_hook-000000000000").name)
    done = install(folder)
    assert done.is_new
    assert str((folder / CURRENT).readlink()) == done.version == old.name
    assert (folder / "trainer_hook-000000000000/trainer_hook/activation/boot.py").is_file()


def test_another_version_stays_if_asked_for_as_long_as_it_is_whole(folder: Path) -> None:
    package = folder / (folder / CURRENT).readlink()
    (folder / CURRENT).unlink()
    (folder / CURRENT).symlink_to(package.rename(folder / "trainer_hook-000000000000").name)
    kept = install(folder, keeps_other=True)
    assert (kept.version, kept.is_new) == ("trainer_hook-000000000000", False)
    assert str((folder / CURRENT).readlink()) == kept.version
    (folder / CURRENT / "trainer_hook/activation/boot.py").unlink()
    assert install(folder, keeps_other=True).is_new
    assert str((folder / CURRENT).readlink()) == package.name


def test_every_user_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = install(tmp_path / "hook").folder
    finally:
        os.umask(before)
    inside = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert len(inside) > 20
    assert {path.stat().st_mode & 0o777 for path in inside} == {0o755, 0o644}


def test_many_at_once_leave_one_whole_copy(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: install(tmp_path / "hook"), range(16)))
    assert len({installed.version for installed in done}) == 1
    assert {p.name for p in (tmp_path / "hook").iterdir()} == {"sitecustomize.py", done[0].version, CURRENT}
    assert python("print('up')", path=(tmp_path / "hook",)).stderr == ""


def test_a_sitecustomize_of_somebody_else_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "sitecustomize.py"
    theirs.write_text("print('theirs')\n")
    with pytest.raises(NotInstalled, match="choose a folder of its own"):
        install(tmp_path)
    assert main.main(["install-hook", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["sitecustomize.py"]
    assert theirs.read_text() == "print('theirs')\n"


def test_the_command_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["install-hook", str(tmp_path / "hook")]) == 0
    assert f"PYTHONPATH={tmp_path}/hook CKPT_HOOK=auto" in capsys.readouterr().out
    (tmp_path / "file").touch()
    for folder in ("file", "file/hook"):
        assert main.main(["install-hook", str(tmp_path / folder)]) == 1
        said = f"{tmp_path}/file is a file, not a folder: choose a folder, such as {tmp_path}/hook\n"
        assert capsys.readouterr().err == f"checkpoint-sidecar install-hook: {said}"
    assert main.main(["install-hook", "/proc/nope"]) == 1
    assert "mount the shared volume writable there" in capsys.readouterr().err


def test_whatever_is_broken_in_it_is_one_line_and_the_interpreter_lives(folder: Path) -> None:
    boot = (folder / CURRENT / "trainer_hook/activation/boot.py").resolve()
    for broken in ("raise RuntimeError('broken on purpose')\n", "this is no Python\n", "\x00"):
        boot.write_text(broken)
        ended = python("print('script')", path=(folder,))
        assert ended.stdout == "script\n"
        assert ended.stderr.startswith("[checkpoint] WARNING: the hook is off: ")
        assert ended.stderr.count("\n") == 1
    closed = [sys.executable, "-c", "print('script')"]
    environ = plain_environ() | {"CKPT_HOOK": "auto", "PYTHONPATH": str(folder)}
    ended = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *closed], env=environ, stdout=subprocess.PIPE, check=True)
    assert ended.stdout == b"script\n", "also without a standard error"


@pytest.mark.parametrize(("wanted", "warns"), [("1", True), ("Auto", True), ("off", False), (" ", False), ("auto ", False)])
def test_a_misspelt_ckpt_hook_is_not_taken_for_off(wanted: str, warns: bool, folder: Path) -> None:
    ended = python("print('script')", path=(folder,), CKPT_HOOK=wanted)
    said = f"[checkpoint] WARNING: the hook is off: CKPT_HOOK={wanted!r} must be auto, or off\n"
    assert (ended.stdout, ended.stderr) == ("script\n", said if warns else "")


def test_the_next_sitecustomize_on_the_path_runs_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    ended = python("print('script')", path=(folder, tmp_path))
    assert (ended.stdout, ended.stderr) == ("theirs\nscript\n", "")


def test_an_interpreter_that_trains_nothing_pays_little_even_if_nothing_may_be_cached(folder: Path) -> None:
    bare_s = median_s("-c", "pass")
    active_s = median_s("-c", "pass", PYTHONPATH=str(folder), CKPT_HOOK="auto", PYTHONDONTWRITEBYTECODE="1")
    print(f"bare {1000 * bare_s:.1f} ms, installed and on {1000 * active_s:.1f} ms")
    assert active_s - bare_s < 0.2


SPAWNS = """
import multiprocessing, signal
from transformers.trainer import Trainer

def look(queue):
    import threading
    names = [thread.name for thread in threading.enumerate()]
    queue.put((signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "checkpoint-signal" in names))

if __name__ == "__main__":
    for kind in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(kind)
        queue = context.SimpleQueue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        print(kind, *queue.get())
        child.join()
"""


def test_processes_that_multiprocessing_starts_keep_their_signals(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environ = plain_environ() | {"CKPT_HOOK": "auto", "CKPT_DIR": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(fake_transformers(tmp_path / "fake"))])
    command = [sys.executable, str(tmp_path / "spawns.py")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "spawn True False\nforkserver True False\nfork True False\n", ended.stderr


@pytest.mark.slow
def test_a_script_is_saved_just_in_time_with_the_folder_alone(folder: Path, volume: Path, answers: Answers) -> None:
    settings = answers.settings | {"PYTHONPATH": str(folder), "CKPT_HOOK": "auto"}
    with training(script(args={"max_steps": 100}, sleep_s=0.1), volume, settings, hooked=False) as running:
        running.at_step(3)
        assert running.terminate() == 143, running.log()
        assert finished(volume) == [f"checkpoint-{running.steps()[-1]}"]
        assert str(ROOT) not in running.log()
