"""Injection into the text of a file with several documents; lines that do not change keep every character."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.documents import Injected, inject, inject_in_place
from sidecar.kubernetes.inject.fields import metadata_of
from sidecar.kubernetes.inject.kyaml import kyaml
from sidecar.kubernetes.inject.merging import merged
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.pod_templates import BY_WEBHOOK
from sidecar.kubernetes.inject.recalled import has_sidecar
from sidecar.kubernetes.inject.reports import UNEXPECTED_TYPE, InjectWarning, NotInjectable, unexpected_type
from sidecar.kubernetes.inject.workload import JOB, JOBSET

MOST_VALUES = 1_000_000
"""Maximum number of values of a document, far more than the API server takes: a few lines of aliases stand for billions."""
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_NESTED = re.compile(r"^( *(?:- +)*)[^\s#][^\n]*:[ ]*(?:#[^\n]*)?\n(?:[ ]*(?:#[^\n]*)?\n)*( *)(- )?", re.MULTILINE)
"""A key without a value on its line, and the beginning of the next line."""
_AMBIGUOUS = re.compile(r"|~|null|true|false|y|n|yes|no|on|off|[-+.0-9][-+.0-9a-fox_:e]*", re.IGNORECASE)
"""Strings that some YAML parser reads as another type; Kubernetes' parser knows the words of YAML 1.1, too."""


@dataclass(frozen=True, slots=True)
class InjectedText:
    """The new text, warnings, and the number of pod templates with the sidecar."""

    text: str
    warnings: tuple[InjectWarning, ...]
    pods: int
    stores: tuple[str, ...] = ()
    runtimes: frozenset[str] = frozenset()
    """Names of the training runtimes that got the sidecar."""


def inject_text(text: str, options: Options) -> InjectedText:
    """Put the sidecar into every document of a YAML or JSON text.

    Raises:
        NotInjectable: A document is not understood, or none has pods that train.
        ConfigurationError: ruamel.yaml is not installed.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.replace("\r\n", "\n")
    try:
        done = _inject_json(plain, options) or _inject_yaml(plain, options)
    except UNEXPECTED_TYPE as error:
        raise unexpected_type("", error) from error
    if not done.pods:
        known = "Pod, Job, CronJob, JobSet, TrainingRuntime, TrainJob, PyTorchJob, RayJob, …"
        text = f"nothing here has pods of a known kind ({known}); those of others {BY_WEBHOOK}"
        raise NotInjectable("", f"--only {','.join(options.only)}: nothing here with pods is that" if options.only else text)
    return InjectedText(
        done.text.replace("\n", newline), (*done.warnings, *_shared_prefixes(done.stores)), done.pods, done.stores
    )


def _inject_yaml(text: str, options: Options) -> InjectedText:
    texts = _parts(text)
    # Without a store, options of earlier injections change: documents without a sidecar were left out then, too.
    only_again = options.store is None and any(has_sidecar(_load(text)) for text in texts)
    parts = [_inject_part(text, options, only_again=only_again) for text in texts]
    runtimes = frozenset(name for part in parts for name in part.runtimes)
    said = (warning for part in parts for warning in part.warnings)
    warnings = tuple(warning for warning in said if warning.unless_injected not in runtimes)
    stores = tuple(store for part in parts for store in part.stores)
    return InjectedText("".join(part.text for part in parts), warnings, sum(part.pods for part in parts), stores)


def _shared_prefixes(stores: tuple[str, ...]) -> Iterator[InjectWarning]:
    for store, count in Counter(stores).items():
        if count > 1 and JOB not in store and JOBSET not in store:
            text = (
                f"{count} workloads have this prefix: unless they are one run, put {{name}} into --store or choose with --only"
            )
            yield InjectWarning(store, text)


def _parts(text: str) -> list[str]:
    """Split at the ``---`` lines, each of which begins a part."""
    starts = [match.start() for match in _SEPARATOR.finditer(text)]
    edges = [0, *(start for start in starts if start), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def _inject_part(text: str, options: Options, *, only_again: bool) -> InjectedText:
    loaded = _load(text)
    if loaded is None:
        return InjectedText(text, (), 0)
    done = inject_in_place(_load(text), options, only_again=only_again)
    if done.document == loaded:
        return _injected(text, loaded, done)
    candidates = list(_candidates(text, loaded, done.document))
    # A change to what an anchor shares reaches all who share it only in the text: then no candidate compares equal.
    new = next((candidate for candidate in candidates if _same(candidate, done)), candidates[-1])
    if not new.endswith("\n"):
        new += "\n"
    return _injected(new, loaded, done)


def _injected(text: str, loaded: Any, done: Injected) -> InjectedText:
    """Return the result for one document, whose new text this is."""
    name = _called(loaded)
    warnings = tuple(replace(warning, path=f"{name}: {warning.path}") for warning in done.warnings)
    kind, _, called = name.partition("/")
    runtimes = frozenset([called] if kind.endswith("TrainingRuntime") else [])
    return InjectedText(text, warnings, done.pods, done.stores, runtimes)


def _candidates(text: str, loaded: Any, document: Any) -> Iterator[str]:
    """Yield texts of the changed document, the one that keeps most of the original first."""
    writers = [_dump]
    if loaded.fa.flow_style() and "\n" in text.strip("-\n "):
        writers.insert(0, _dump_braces)
    for write in writers:
        # Compared with the unchanged document as the same writer writes it, so that its style is no difference.
        before, after = write(loaded, text), write(document, text)
        mixed = merged(text, before, after)
        if mixed is not None:
            yield mixed
        yield after


def _dump_braces(document: Any, text: str) -> str:
    return ("---\n" if _SEPARATOR.match(text) else "") + kyaml(document)


def _same(text: str, done: Injected) -> bool:
    try:
        return bool(_load(text) == done.document)
    except NotInjectable:
        return False


def _called(document: Any) -> str:
    name = metadata_of(document).get("name") if hasattr(document, "get") else None
    return f"{document.get('kind')}/{name}" if name else str(document.get("kind"))


def _yaml(text: str) -> Any:
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise ConfigurationError("ruamel.yaml is not installed: pip install 'checkpoint-sidecar[inject]'") from None
    yaml = YAML(typ="rt", pure=True)
    yaml.Constructor = _constructor()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    yaml.explicit_start = bool(_SEPARATOR.match(text))
    mapping, offset = _style(text)
    yaml.indent(mapping=mapping, sequence=2 + offset, offset=offset)
    yaml.representer.add_representer(type(None), _represent_null)
    yaml.representer.add_representer(str, _represent_text)
    yaml.representer.add_representer(list, _represent_list)
    return yaml


@cache
def _constructor() -> Any:
    from ruamel.yaml.constructor import RoundTripConstructor
    from ruamel.yaml.scalarstring import PlainScalarString

    class Constructor(RoundTripConstructor):
        """Keeps a word without quotes, such as ``yes``: a text to YAML 1.2, true to Kubernetes, and quoted a text to both."""

        def construct_scalar(self, node: Any) -> Any:
            value = super().construct_scalar(node)
            return PlainScalarString(value) if type(value) is str and _AMBIGUOUS.fullmatch(value) else value

    return Constructor


def _represent_null(representer: Any, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _represent_text(representer: Any, text: str) -> Any:
    style = '"' if _AMBIGUOUS.fullmatch(text) else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(representer: Any, items: list[Any]) -> Any:
    """Short lists of words, such as commands, in one line; these are only the lists that are new."""
    words = bool(items) and all(isinstance(item, str) for item in items) and len(" ".join(items)) < 80
    return representer.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=words)


def _style(text: str) -> tuple[int, int]:
    """Return by how much most mappings and most lists of the text are indented against their key."""
    mappings: Counter[int] = Counter()
    lists: Counter[int] = Counter()
    begin = 0
    while match := _NESTED.search(text, begin):
        (lists if match[3] else mappings)[len(match[2]) - len(match[1])] += 1
        begin = match.start(2) if match.start(2) > match.start() else match.end()
    widths = [(count, width) for width, count in mappings.items() if width > 0]
    offsets = [(count, width) for width, count in lists.items() if width >= 0]
    return max(widths, default=(0, 2))[1], max(offsets, default=(0, 0))[1]


def _load(text: str) -> Any:
    yaml = _yaml(text)
    from ruamel.yaml.error import YAMLError

    try:
        document = yaml.load(text)
        is_bounded = _values(document, {}) <= MOST_VALUES
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} of the document" if mark is not None else ""
        said = getattr(error, "problem", None) or str(error)
        raise NotInjectable(where, f"is no YAML ({said}); a template must be rendered first") from None
    except (*UNEXPECTED_TYPE, AssertionError, NotImplementedError) as error:  # a tag that ruamel cannot construct
        raise NotInjectable("", f"is no YAML that can be read ({type(error).__name__}: {str(error)[:200]})") from error
    if not is_bounded:
        raise NotInjectable("", f"its aliases stand for more than {MOST_VALUES:,} values")
    return document


def _values(value: Any, counted: dict[int, int]) -> int:
    """Return the number of values of a document, with those of an alias counted at each place; ``counted``: by object.

    Raises:
        NotInjectable: A key is a mapping, as in ``{{ .Values.image }}``.
    """
    if not isinstance(value, MutableMapping | list):
        return 1
    if isinstance(value, MutableMapping) and any(isinstance(key, Mapping) for key in value):
        raise NotInjectable("", "has a placeholder ({{ … }}); a template must be rendered first")
    if id(value) not in counted:
        counted[id(value)] = MOST_VALUES  # if it holds itself
        inside = value.values() if isinstance(value, MutableMapping) else value
        counted[id(value)] = 1 + sum(_values(each, counted) for each in inside)
    return counted[id(value)]


def _dump(document: Any, text: str) -> str:
    stream = io.StringIO()
    _yaml(text).dump(document, stream)
    return stream.getvalue()


def _inject_json(text: str, options: Options) -> InjectedText | None:
    """Inject into JSON; ``None``: the text is no JSON."""
    try:
        loaded = json.loads(text.lstrip("\ufeff"))
    except ValueError:
        return None
    done = inject(loaded, options)
    if done.document != loaded:
        indent = re.search(r"\n( +)\"", text)
        text = json.dumps(done.document, indent=len(indent[1]) if indent else None) + "\n"
    return _injected(text, loaded, done)
