"""Parser of shell scripts, for warnings about exit codes and SIGTERM. Nothing is expanded or run.

An exit code that is swallowed makes a preempted Job *Complete*; a shell that keeps SIGTERM to itself takes the notice away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_PREFIXES = frozenset({"exec", "env", "time", "nohup", "nice", "sudo", "stdbuf", "ionice", "setsid", "command", "numactl"})
LAUNCHES = re.compile(
    r"torchrun|accelerate|deepspeed|mpirun|mpiexec|horovodrun|composer|colossalai|srun|trainer_hook|torch\.distributed\S*"
    r"|\S*train\S*"
)
RUNS = re.compile(r"(python[0-9.]*|ray|lightning|julia|java|uv|poetry|conda)")
_TRIVIAL = """
    true false : echo printf exit sleep wait sync cp mv ls cat date rm mkdir cd export set trap tee tail head grep sed awk
    aws gsutil rclone curl wget touch chmod ulimit source . unset kill ts tr test [ [[ pip pip3 apt-get apt git tar ln env
    hostname nvidia-smi
"""
TRIVIAL = frozenset(_TRIVIAL.split())
"""Programs that are no trainers."""
_OPENERS, _CLOSERS = ("if", "while", "until", "for", "case", "{", "("), ("fi", "done", "esac", "}", ")")
_MOST_CALLS = 4
"""Maximum depth of calls between functions."""
_MOST_INLINED = 1000
"""Maximum number of commands of functions' bodies, over all calls."""


@dataclass(frozen=True, slots=True)
class Shell:
    """A shell that runs a script which the manifest holds."""

    script: str
    options: frozenset[str]
    """Options of its command line: ``errexit``, ``pipefail``."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word, or an operator of the shell's grammar."""

    text: str
    is_operator: bool = False


def shell_of(words: Sequence[str]) -> Shell | None:
    """Return the shell of a container's command and arguments; ``None`` where it runs no script with ``-c``.

    What stands in front of it, such as ``tini --`` or ``timeout 3h``, hands its exit code on.
    """
    index = next((index for index, word in enumerate(words) if word.rpartition("/")[2] in SHELLS), None)
    if index is None:
        return None
    on: set[str] = set()
    has_script, rest = False, iter(words[index + 1 :])
    for word in rest:
        if word.startswith("--"):
            continue
        if not re.match(r"[-+][A-Za-z]+$", word):
            return Shell(word, frozenset(on)) if has_script else None
        has_script = has_script or (word[0] == "-" and "c" in word)
        names = [{"e": "errexit"}.get(letter, "") for letter in word[1:]]
        if word.endswith("o"):
            names.append(next(rest, ""))
        on = on | set(names) if word[0] == "-" else on - set(names)
    return None


def tokens(script: str) -> list[Token]:
    """Split a script into words and operators; quotes, substitutions, comments and here-documents are as in a shell.

    Redirections are left out; text that ends within quotes ends there.
    """
    return list(_Lexer(script).run())


class _Lexer:
    def __init__(self, script: str) -> None:
        self._text = script
        self._at = 0
        self._heredocs: list[str] = []

    def run(self) -> Iterator[Token]:
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif here == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif here == "\n":
                self._at += 1
                self._skip_heredocs()
                yield Token("\n", is_operator=True)
            elif match := re.compile(r"(\d*|\{\w+\})(&>>?|[<>]\(|<<<|<<-?|[<>]&|>>|>\||<>|[<>])").match(self._text, self._at):
                yield from self._redirection(match)
            elif match := re.compile(r"&&|\|\||;;|\|&|[;&|()]").match(self._text, self._at):
                self._at = match.end()
                yield Token("|" if match[0] == "|&" else match[0], is_operator=True)
            else:
                yield Token(self._word())

    def _redirection(self, match: re.Match[str]) -> Iterator[Token]:
        self._at = match.end()
        if match[2] in ("<(", ">("):
            self._skip_nested("(", ")")
            return
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._text.startswith((">(", "<("), self._at):
            self._at += 2
            self._skip_nested("(", ")")
            return
        target = self._word()
        if match[2] in ("<<", "<<-"):
            self._heredocs.append(target)
        yield from ()

    def _skip_heredocs(self) -> None:
        for end in self._heredocs:
            match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self._text, self._at)
            self._at = len(self._text) if match is None else match.end()
        self._heredocs = []

    def _word(self) -> str:
        found = []
        while self._at < len(self._text) and self._text[self._at] not in " \t\r\n;&|()<>":
            here = self._text[self._at]
            begin = self._at
            self._at += 1
            if here == "\\":
                self._at += 1
                found.append(self._text[begin + 1 : self._at].replace("\n", ""))
            elif here == "'":
                end = self._text.find("'", self._at)
                self._at = len(self._text) if end < 0 else end + 1
                found.append(self._text[begin + 1 : self._at - 1])
            elif here == '"':
                self._skip_double_quotes()
                found.append(self._text[begin + 1 : self._at - 1])
            elif here == "`":
                end = self._text.find("`", self._at)
                self._at = len(self._text) if end < 0 else end + 1
                found.append(self._text[begin : self._at])
            elif here == "$" and self._text.startswith(("(", "{"), self._at):
                opener = self._text[self._at]
                self._at += 1
                self._skip_nested(opener, {"(": ")", "{": "}"}[opener])
                found.append(self._text[begin : self._at])
            else:
                found.append(here)
        return "".join(found)

    def _skip_double_quotes(self) -> None:
        while self._at < len(self._text) and self._text[self._at] != '"':
            if self._text.startswith(("$(", "${"), self._at):
                opener = self._text[self._at + 1]
                self._at += 2
                self._skip_nested(opener, {"(": ")", "{": "}"}[opener])
            else:
                self._at += 2 if self._text[self._at] == "\\" else 1
        self._at += 1

    def _skip_nested(self, opener: str, closer: str) -> None:
        depth = 1
        while self._at < len(self._text) and depth:
            here = self._text[self._at]
            self._at += 1
            if here == "\\":
                self._at += 1
            elif here == "'":
                end = self._text.find("'", self._at)
                self._at = len(self._text) if end < 0 else end + 1
            elif here == '"':
                self._skip_double_quotes()
            else:
                depth += (here == opener) - (here == closer)


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command of a script, and what stands around it."""

    words: tuple[str, ...]
    before: str
    """The operator in front of it, empty at the beginning."""
    after: str
    """The operator behind it, or the word that closes what it stands in; empty at the end."""
    within: tuple[str, ...]
    """What it stands in, the outermost first: ``if``, ``while``, ``{``, ``(`` …; a condition's is called ``if?``."""

    @property
    def program(self) -> str:
        """The name of what it runs, without assignments and wrappers."""
        rest = list(_without_prefixes(self.words))
        return rest[0].rpartition("/")[2] if rest else ""


def _without_prefixes(words: Sequence[str]) -> Sequence[str]:
    index = 0
    while index < len(words):
        word = words[index]
        if word == "timeout":
            index += 1
            while index < len(words) and (words[index].startswith("-") or re.match(r"[0-9.]+[smhd]?$", words[index])):
                index += 1
        elif word in _PREFIXES or re.match(r"\w+=", word) or word == "!" or (index and word.startswith("-")):
            index += 1
        else:
            break
    return words[index:]


def commands(script: str) -> list[Command]:
    """Return the simple commands of a script in their order; where a function is called, those of its body as of a group."""
    found = _parsed(script)
    return _inlined([command for command in found if not _function_of(command)], _bodies(found))


def commands_of_trap(action: str, script: str) -> list[Command]:
    """Return the simple commands of what a trap runs, which may call functions of the script."""
    return _inlined(_parsed(action), _bodies(_parsed(script)))


def _function_of(command: Command) -> str | None:
    """Return the name of the function in whose body a command stands, the outermost one."""
    return next((part.removesuffix("()") for part in command.within if part.endswith("()")), None)


def _bodies(found: Sequence[Command]) -> dict[str, list[Command]]:
    bodies: dict[str, list[Command]] = {}
    for command in found:
        if name := _function_of(command):
            inside = command.within[command.within.index(f"{name}()") + 1 :]
            bodies.setdefault(name, []).append(replace(command, within=inside))
    return bodies


def _inlined(found: Sequence[Command], bodies: Mapping[str, list[Command]]) -> list[Command]:
    """Put bodies in the place of calls, as far as is bounded: functions may call themselves."""
    done: list[Command] = []
    left = [(command, 0) for command in reversed(found)]
    most = _MOST_INLINED
    while left:
        command, depth = left.pop()
        body = bodies.get(command.program) if depth < _MOST_CALLS else None
        if not body or len(body) > most:
            done.append(command)
            continue
        most -= len(body)
        inner = [replace(part, within=(*command.within, "{", *part.within)) for part in body if not _function_of(part)]
        if command.after == "&" and inner:
            inner[-1] = replace(inner[-1], after="&")
        left += [(part, depth + 1) for part in reversed(inner)]
    return done


def _names_function(words: Sequence[str]) -> bool:
    """Whether words are the beginning of a function's definition."""
    return (len(words) == 2 and words[1] == "()") or (len(words) in (2, 3) and words[0] == "function")


def _parsed(script: str) -> list[Command]:
    parser = _Parser()
    for token in tokens(script):
        if token.is_operator:
            parser.operator(token.text)
        else:
            parser.word(token.text)
    parser.end("")
    return parser.found


class _Parser:
    """Makes commands of tokens."""

    def __init__(self) -> None:
        self.found: list[Command] = []
        self._within: list[str] = []
        self._words: list[str] = []
        self._before = ""

    def end(self, after: str) -> None:
        """End the command whose words were read, if there are any."""
        if self._words:
            self.found.append(Command(tuple(self._words), self._before, after, tuple(self._within)))
            self._words = []
        self._before = after

    def operator(self, text: str) -> None:
        """Take an operator."""
        if text == "(" and self._words:  # the parentheses of a function's name
            self._words.append("()")
        elif text == "(":
            self._open(text, "(")
        elif text == ")":
            if self._words[-1:] != ["()"]:
                self._close(text, only="(")
        elif text != "\n" or self._words[-1:] != ["()"]:
            if text == "&" and not self._words and self._before in (")", "}") and self.found:
                self.found[-1] = replace(self.found[-1], after="&")  # the whole group runs in the background
            self.end(text)

    def word(self, text: str) -> None:
        """Take a word, which may be one of the shell's own."""
        if text == "{" and _names_function(self._words):
            name, self._words = self._words[self._words[0] == "function"], []
            self._open(text, f"{name}()")
        elif self._words:
            self._words.append(text)
        elif text in _OPENERS:
            self._open(text, f"{text}?" if text in ("if", "while", "until") else text)
        elif text in ("then", "do", "else", "elif"):
            self.end(text)
            if self._within:
                self._within[-1] = self._within[-1].rstrip("?") + ("?" if text == "elif" else "")
        elif text in _CLOSERS:
            self._close(text)
        else:
            self._words.append(text)

    def _open(self, text: str, inside: str) -> None:
        self.end(text)
        self._within.append(inside)

    def _close(self, text: str, *, only: str | None = None) -> None:
        self.end(text)
        if self._within and only in (None, self._within[-1]):
            self._within.pop()
