"""Hooks of mkdocs: pages that stand outside docs/, and every file that a page links to, become part of the site.

The Markdown files keep links that work in the repository. Here a link to a page becomes a link to that page of the site, and a
link to another file, such as a manifest, a link to a page that shows it. A link to what is not in the repository stays as it
is, and mkdocs's strict mode fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs_site import markdown

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "OPERATIONS.md": "operations.md",
    "FORMAT.md": "format.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the repository, and their places in the site."""
SOURCES = "files"
"""Folder of the site with pages that show other files."""
LANGUAGES = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".md": "markdown",
}
PICTURES = (".svg", ".png")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages that the navigation does not name into a section at its end."""
    docs = Path(config.docs_dir)
    named = str(config.nav)
    more = [name for name in (str(page.relative_to(docs)) for page in sorted(docs.rglob("*.md"))) if f"'{name}'" not in named]
    if config.nav is not None and more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, and pages for the files that any page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    for source, page in PAGES.items():
        texts[source] = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=texts[source]))
    shown: set[str] = set()
    waiting = [target for place, text in texts.items() for target in _targets(place, text)]
    while waiting:
        target = waiting.pop()
        path = ROOT / target
        if target in shown or target in PAGES or target.startswith("docs/") or not path.exists():
            continue
        shown.add(target)
        if path.is_dir():
            waiting += [f"{target}/{each.name}" for each in _entries(path) if each.is_file()]
        files.append(File.generated(config, _page_of(target), content=_shown(target)))
    return files


def on_page_markdown(text: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    source = page.file.src_uri
    if source.startswith(f"{SOURCES}/"):
        return text
    place = next((repository for repository, site in PAGES.items() if site == source), f"docs/{source}")

    def change(target: str) -> str:
        if "://" in target or target.startswith(("#", "mailto:")):
            return target
        path, mark, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
        if not (ROOT / wanted).exists():
            return target
        return posixpath.relpath(_page_of(wanted), posixpath.dirname(source) or ".") + mark + anchor

    return _pipes(markdown.with_links(text, change))


def _pipes(text: str) -> str:
    """Return the text with the escaped pipes of code in tables unescaped: GitHub needs the escape, Python-Markdown shows it."""
    return re.sub(
        r"^\|.*$", lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0]), text, flags=re.MULTILINE
    )


def _targets(place: str, text: str) -> list[str]:
    found = []
    for target in markdown.links(text):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:"):
            found.append(posixpath.normpath(posixpath.join(posixpath.dirname(place), path)))
    return found


def _page_of(target: str) -> str:
    """Return the place in the site of a path in the repository."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{SOURCES}/{target}/index.md" if (ROOT / target).is_dir() else f"{SOURCES}/{target}.md"


def _entries(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith((".", "__")))


def _shown(target: str) -> str:
    path = ROOT / target
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n"
    if path.is_dir():
        names = [f"- [{each.name}]({each.name}.md)\n" for each in _entries(path) if each.is_file()]
        return head + "Files of this folder of the repository:\n\n" + "".join(names)
    return head + f"````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
