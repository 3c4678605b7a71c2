"""Links, settings, commands and messages that the Markdown files name are there, and generated pages say what the code says."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs_site import markdown, reference
from docs_site.reference_commands import all_commands, options_of
from sidecar.kubernetes.inject.options import ENVIRONMENT, FLAGS
from trainer_hook.contract import KNOWN_SETTINGS
from trainer_hook.contract.environment import REMOVED_SETTINGS

ROOT = Path(__file__).parents[2]
SKIPPED = {"build", "node_modules", "site-packages"}


def pages() -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


PAGES = sorted(pages())
OF_USERS = [page for page in PAGES if page.parent == ROOT or ROOT / "docs" in page.parents]
OF_TESTS_AND_IMAGES = re.compile(r"CKPT_(TEST|CLUSTER|CI|NAME$|$)")
"""Prefixes of variables that are no settings, and stand-ins."""
PROGRAMS = {"checkpoint-sidecar": 1, "kubectl ckpt": 2}
"""Words of each program whose commands are checked."""
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
by_page_of_users = pytest.mark.parametrize("page", OF_USERS, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def text_of(page: Path) -> str:
    return page.read_text()


@cache
def anchors_of(page: Path) -> set[str]:
    return markdown.anchors(text_of(page))


@by_page
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    broken = []
    for target in markdown.links(text_of(page)):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert not broken


@by_page
def test_no_link_hides_in_a_form_that_is_not_read(page: Path) -> None:
    found = len(re.findall(r"\]\((?!https?:)[^)\s]+\)", markdown.without_code(text_of(page))))
    assert len([target for target in markdown.links(text_of(page)) if "://" not in target]) >= found


def settings_named(page: Path) -> set[str]:
    return {name for name in re.findall(r"CKPT_[A-Z0-9_]*", text_of(page)) if not OF_TESTS_AND_IMAGES.match(name)}


@by_page_of_users
def test_settings_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    flags = {f"{ENVIRONMENT}{flag.field.upper()}" for flag in FLAGS}
    families = {name for name in settings_named(page) if name.endswith("_")}
    assert not settings_named(page) - KNOWN_SETTINGS - flags - REMOVED_SETTINGS.keys() - families
    for family in families:
        assert any(name.startswith(family) for name in KNOWN_SETTINGS | flags), family


def test_every_setting_is_described() -> None:
    assert settings_named(ROOT / "docs/settings.md") >= KNOWN_SETTINGS


def command_lines(page: Path) -> list[str]:
    """Return what is typed: lines of blocks, with continuations joined, and spans that begin with a program."""
    blocks = [line for _, block in markdown.code_blocks(text_of(page)) for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip().removeprefix("$ ") for line in [*blocks, *markdown.code_spans(text_of(page))]]


def commands_in(line: str) -> list[list[str]]:
    """Return the words of each command of ours in a line of a shell. To helm, our name is that of a release."""
    found: list[list[str]] = []
    if line.lstrip("$ ").startswith("helm "):
        return found
    for match in re.finditer(r"(?:^|[\s(;&|`])(checkpoint-sidecar|kubectl ckpt) +([a-z][^|&;)>]*)", line):
        try:
            words = shlex.split(match[2], comments=True)
        except ValueError:
            words = match[2].split()
        found.append([match[1], *words])
    return found


@by_page_of_users
def test_commands_and_options_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    commands, wrong = all_commands(), []
    for line in command_lines(page):
        for program, *words in commands_in(line):
            name, rest = program, list(words)
            while rest and (name in commands and hasattr(commands[name], "commands")) and re.fullmatch(r"[a-z-]+", rest[0]):
                name = f"{name} {rest.pop(0)}"
            if not rest and "|" in line and name not in commands:
                continue
            if name not in commands:
                wrong.append(line)
                continue
            named = {word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
            if unknown := named - options_of(commands[name]) - {"--version"}:
                wrong.append(f"{line}: {sorted(unknown)}")
    assert not wrong


def test_the_check_of_commands_sees_what_is_wrong() -> None:
    assert commands_in("x=1 checkpoint-sidecar ls s3://b/p --newest 3 | head") == [
        ["checkpoint-sidecar", "ls", "s3://b/p", "--newest", "3"]
    ]
    assert "--newest" in options_of(all_commands()["checkpoint-sidecar ls"])
    assert "--latest" not in options_of(all_commands()["checkpoint-sidecar ls"])
    assert "checkpoint-sidecar plan grace" in all_commands()
    assert "kubectl ckpt pause" in all_commands()


def test_generated_pages_say_what_the_code_says() -> None:
    assert not reference.stale(), "run: make reference"


def test_every_message_of_the_sidecar_is_explained() -> None:
    logged = set()
    for module in (ROOT / "sidecar").rglob("*.py"):
        logged |= set(re.findall(r"\blog\.(?:warning|error|critical|exception)\(\s*\"([a-z_]+)\"", module.read_text()))
    assert len(logged) > 40
    explained = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)", text_of(ROOT / "docs/troubleshooting.md")))
    assert not logged - explained, "a line in docs/troubleshooting.md is missing"


def test_messages_that_are_explained_are_logged() -> None:
    source = "".join(module.read_text() for module in (ROOT / "sidecar").rglob("*.py"))
    [*parts] = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*)", text_of(ROOT / "docs/troubleshooting.md"), re.MULTILINE)
    events = {name for part in parts for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", part)}
    made_of_a_state = {f"save_{state}" for state in ("asked", "saved", "durable", "failed")}
    assert not {name for name in events - made_of_a_state if f'"{name}"' not in source}


def test_the_site_s_navigation_names_pages_that_are_there() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert listed - {*hooks_pages()} <= {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents
    }


def hooks_pages() -> set[str]:
    """Return the places in the site of pages that stand outside docs/."""
    return set(re.findall(r"\"[A-Z]+\.md\": \"([a-z]+\.md)\"", (ROOT / "docs_site/hooks.py").read_text()))
