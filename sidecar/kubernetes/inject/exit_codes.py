"""Whether a trainer's exit code and SIGTERM get through the shell that starts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sidecar.kubernetes.inject.shell import (
    LAUNCHES,
    RUNS,
    SHELLS,
    TRIVIAL,
    Command,
    Shell,
    commands,
    commands_of_trap,
    shell_of,
)

_INITS = frozenset({"tini", "tini-static", "dumb-init", "catatonit", "docker-init", "timeout"})
"""Programs that stay PID 1, pass SIGTERM on to what they started, and end with it."""
_ENDING = ("EXIT", "0", "TERM", "SIGTERM", "15")


def trainer_of(found: Sequence[Command]) -> int | None:
    """Return the index of the command that trains: the last launcher, interpreter, or other program."""
    for matches in (_is_launcher, _is_interpreter, _has_weight):
        indices = [index for index, command in enumerate(found) if matches(command)]
        if indices:
            return indices[-1]
    return None


def _nested(command: Command) -> Shell | None:
    """Return the shell that a command of a script runs another script with, ``eval`` among them."""
    if command.program == "eval":
        words = command.words[command.words.index("eval") + 1 :]
        return Shell(" ".join(words), frozenset())
    return shell_of(command.words)


def _is_launcher(command: Command) -> bool:
    nested = _nested(command)
    if nested is not None:
        return any(map(_is_launcher, commands(nested.script)))
    if command.program in TRIVIAL or command.program.startswith(("pip", "#")):
        return False
    is_installing = "pip" in command.words or "-c" in command.words
    return not is_installing and any(LAUNCHES.fullmatch(word.rpartition("/")[2]) for word in command.words[:8])


def _is_interpreter(command: Command) -> bool:
    return RUNS.fullmatch(command.program) is not None and not {"pip", "-c", "--version", "-V"} & set(command.words)


def _has_weight(command: Command) -> bool:
    return command.program not in TRIVIAL and bool(command.program)


def swallowed(shell: Shell) -> str | None:
    """Return the reason why the shell ends with another exit code than its trainer; ``None``: it does not."""
    found = commands(shell.script)
    index = trainer_of(found)
    if index is None:
        return None
    reason = next(_reasons(shell, found, index), None)
    nested = _nested(found[index])
    if reason is not None or nested is None:
        return reason
    is_same_shell = found[index].program == "eval"
    more = _options(shell, found[:index]) if is_same_shell else set()
    return swallowed(Shell(nested.script, nested.options | more))


def _reasons(shell: Shell, found: Sequence[Command], index: int) -> Iterator[str]:
    trainer, later = found[index], list(found[index + 1 :])
    if _takes_the_shells_place(found, index):
        return
    if "!" in trainer.words[:1]:
        yield "'!' turns it round"
    options = _options(shell, found[:index])
    if "!" not in trainer.words[:1] and _is_taken_on(trainer, _else_branch(trainer, later), is_lost=_is_piped(trainer, later)):
        return
    if any(part in ("if?", "while?", "until?") for part in trainer.within):
        yield f"'{next(part for part in trainer.within if part.endswith('?'))[:-1]}' takes it as a condition"
    if _is_taken_on(trainer, later, is_lost="pipefail" not in options and _is_piped(trainer, later)):
        return
    yield from _of_pipeline(trainer, later, options)
    if (otherwise := _stand_in(trainer, later)) is not None:
        yield f"'|| {' '.join(otherwise.words[:2])}' stands in for it"
    if trainer.after == "&" and not _is_waited_for(later):
        yield "it runs in the background, and nothing waits for it by its id ('wait $!')"
    yield from _of_what_follows(trainer, later, options)


def _stand_in(trainer: Command, later: Sequence[Command]) -> Command | None:
    """Return the command that runs when the trainer's list of commands, or a group that it stands in, fails."""
    depth, is_in_list = len(trainer.within), True
    for command in later:
        is_outside = len(command.within) < depth
        if command.before == "||" and (is_outside or (is_in_list and command.within == trainer.within)):
            return command
        depth = min(depth, len(command.within))
        is_in_list = is_in_list and command.before in ("|", "&&")
    return None


def _else_branch(trainer: Command, later: Sequence[Command]) -> list[Command]:
    """Return what runs when the trainer, as the condition of an ``if``, has failed: ``$?`` is still its exit code."""
    if trainer.within[-1:] != ("if?",):
        return []
    depth = len(trainer.within)
    begins = (index for index, command in enumerate(later) if command.before == "else" and len(command.within) == depth)
    return list(later[next(begins, len(later)) :])


def _is_taken_on(trainer: Command, later: Sequence[Command], *, is_lost: bool) -> bool:
    """Whether an ``exit`` hands on what ``$?``, ``PIPESTATUS`` or ``wait`` said right behind the trainer.

    ``is_lost``: whether ``$?`` is another command's of its pipeline.
    """
    rest = list(later)
    if trainer.after == "&":
        waits = [index for index, command in enumerate(rest) if command.words[0] == "wait" and len(command.words) > 1]
        rest = rest[waits[-1] + 1 :] if waits else []
    else:
        rest = _behind_own_list(rest)
    if not rest:
        return False
    first, said = rest[0], " ".join(rest[0].words)
    if first.words[0] in ("exit", "return"):
        return "PIPESTATUS" in said or (not is_lost and (len(first.words) == 1 or "$?" in said))
    takes = re.search(r"=\"?\$\{PIPESTATUS" if is_lost else r"=\"?\$(\?|\{PIPESTATUS)", said)
    return takes is not None and any(
        command.words[0] in ("exit", "return") and "$" in " ".join(command.words) for command in rest[1:]
    )


def _behind_own_list(later: Sequence[Command]) -> list[Command]:
    """Leave out the rest of the trainer's own list: when it fails that is skipped, and the list has its exit code."""
    rest = list(later)
    while rest and rest[0].before in ("&&", "|"):
        rest.pop(0)
    return rest


def _options(shell: Shell, earlier: Sequence[Command]) -> set[str]:
    on = set(shell.options)
    for command in earlier:
        if command.words[0] != "set":
            continue
        for position, word in enumerate(command.words[1:], 1):
            names = ["errexit"] if "e" in word[1:] and word[:1] in "-+" else []
            if word.endswith("o") and word[:1] in "-+":
                names += list(command.words[position + 1 : position + 2])
            on = on | set(names) if word.startswith("-") else on - set(names) if word.startswith("+") else on
    return on


def _of_pipeline(trainer: Command, later: Sequence[Command], options: set[str]) -> Iterator[str]:
    if "pipefail" in options:
        return
    if trainer.after == "|":
        yield f"the pipeline's is that of '{later[0].words[0] if later else '|'}'"
    elif (outside := _behind_group(trainer, later)) is not None and outside.before == "|":
        yield f"the pipeline's is that of '{outside.words[0]}'"


def _is_piped(trainer: Command, later: Sequence[Command]) -> bool:
    behind = _behind_group(trainer, later)
    return trainer.after == "|" or (behind is not None and behind.before == "|")


def _behind_group(trainer: Command, later: Sequence[Command]) -> Command | None:
    """Return the command behind the group that the trainer stands in."""
    return next((command for command in later if len(command.within) < len(trainer.within)), None)


def _takes_the_shells_place(found: Sequence[Command], index: int) -> bool:
    trainer = found[index]
    is_piped = trainer.after == "&" or trainer.before == "|" or _is_piped(trainer, found[index + 1 :])
    return "exec" in [word for word in trainer.words if word != "!"][:1] and not is_piped and "(" not in trainer.within


def _is_waited_for(later: Sequence[Command]) -> bool:
    """Whether the last command waits for one process, whose exit code ``wait`` then has."""
    waits = [index for index, command in enumerate(later) if command.words[0] == "wait" and len(command.words) > 1]
    return bool(waits) and waits[-1] == len(later) - 1


def _of_what_follows(trainer: Command, later: Sequence[Command], options: set[str]) -> Iterator[str]:
    rest = _behind_own_list(later)
    is_guarded = "errexit" in options and trainer.after not in ("&&", "||", "&")
    if trainer.after == "&" and rest and rest[-1].words[0] == "wait":
        return
    if rest and not is_guarded and rest[0].before not in ("||",) and not _are_branches(trainer, rest):
        yield f"'{' '.join(rest[-1].words[:2])}' comes after it"


def _are_branches(trainer: Command, rest: Sequence[Command]) -> bool:
    """Whether what follows stands in other branches of the same ``if`` or ``case``."""
    branches = ("else", "elif", ";;")
    return (
        bool(trainer.within)
        and all(command.before in branches or command.within == trainer.within for command in rest)
        and (rest[0].before in branches)
    )


def keeps_signals(shell: Shell) -> bool:
    """Whether SIGTERM to the shell does not reach the trainer: it stays in front of it, and nothing passes the signal on."""
    found = commands(shell.script)
    index = trainer_of(found)
    if index is None:
        return False
    trainer = found[index]
    traps = [command for command in found if command.words[0] == "trap" and {"TERM", "SIGTERM", "15"} & set(command.words)]
    if traps:
        # A shell runs a trap only when the command in front of it has ended.
        passes_on = "kill" in shell.script and "wait" in shell.script
        return not (passes_on and any(command.after == "&" for command in found))
    if _takes_the_shells_place(found, index):
        return False
    # A single command takes the shell's place.
    return len(found) > 1 or trainer.after == "&"


def ends_before_trainer(shell: Shell, words: Sequence[str], *, is_shared: bool) -> bool:
    """Whether SIGTERM ends a shell with a single command, which then ends the container and its trainer at once.

    As PID 1 a shell without a trap ignores the signal, and the trainer has the notice of the volume. Behind an init, or where
    the pod has one namespace of processes (``is_shared``), it is not PID 1. ``words``: command and arguments of the container.
    """
    names = [word.rpartition("/")[2] for word in words]
    index = next((index for index, name in enumerate(names) if name in SHELLS), len(names))
    if not is_shared and not _INITS & set(names[:index]):
        return False
    found = commands(shell.script)
    # bash, zsh and ksh replace themselves with a single command, bash not where that has a redirection; dash stays.
    stays = names[index] in ("sh", "dash", "ash") or (names[index] == "bash" and re.search("[<>]", shell.script) is not None)
    return stays and len(found) == 1 and not _takes_the_shells_place(found, 0) and not keeps_signals(shell)


def ends_otherwise(shell: Shell) -> str | None:
    """Return a trap that gives the shell another exit code, or ``None``."""
    found = commands(shell.script)
    index = trainer_of(found)
    if index is not None and _takes_the_shells_place(found, index):
        return None  # and takes no trap along
    for command in found:
        signals = [name for name in _ENDING if command.words[0] == "trap" and name in command.words[2:]]
        for inner in commands_of_trap(command.words[1], shell.script) if signals else ():
            code = inner.words[1] if inner.words[0] == "exit" and len(inner.words) > 1 else ""
            if code.isdecimal() and (code != "143" or signals[0] in ("EXIT", "0")):
                return f"the trap on {signals[0]} ends with 'exit {code}'"
    return None
