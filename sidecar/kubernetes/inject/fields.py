"""Reading and changing parsed YAML: plain mappings and lists, or ruamel's, which carry comments and an order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from sidecar.kubernetes.inject.reports import NotInjectable

Fields = MutableMapping[str, Any]

# A webhook's documents are dicts and lists, which this finds without asking the abstract classes.
_MAPPING = (dict, MutableMapping)
_LIST = (list, MutableSequence)


def at(document: Any, path: str) -> Any:
    """Return what is at a path of mappings, or ``None``."""
    for step in path.split("."):
        document = document.get(step) if isinstance(document, Mapping) else None
    return document


def put(mapping: Fields, key: str, value: Any, *, after: Sequence[str] = (), before: Sequence[str] = ()) -> None:
    """Set a key. One that is new goes behind the last of ``after`` or in front of the first of ``before``, else to the end.

    A value that is there already and equal is left as it is, with its comments and its style.
    """
    if key in mapping:
        if mapping[key] != value or type(mapping[key]) is bool is not type(value):
            mapping[key] = value
        return
    insert = getattr(mapping, "insert", None)
    keys = list(mapping)
    positions = [keys.index(name) + 1 for name in after if name in keys]
    fronts = [keys.index(name) for name in before if name in keys]
    place = max(positions) if positions else min(fronts) if fronts else len(keys)
    if insert is None or place == len(keys):
        mapping[key] = value
    else:
        insert(place, key, value)


def section(mapping: Fields, key: str, path: str, **where: Sequence[str]) -> Fields:
    """Return the mapping under a key, made when it is not there or null.

    Raises:
        NotInjectable: There is something else.
    """
    if mapping.get(key) is None:
        put(mapping, key, {}, **where)
    value = mapping[key]
    if not isinstance(value, _MAPPING):
        raise NotInjectable(f"{path}.{key}".lstrip("."), "must be a mapping")
    return value


def entries(mapping: Mapping[str, Any], key: str, path: str) -> Sequence[Fields]:
    """Return the list of mappings under a key; nothing there, or null, is an empty list.

    Raises:
        NotInjectable: There is something else, or an entry is no mapping.
    """
    value = mapping.get(key)
    if value is None:
        return []
    if not isinstance(value, _LIST):
        raise NotInjectable(f"{path}.{key}".lstrip("."), "must be a list")
    for index, entry in enumerate(value):
        if not isinstance(entry, _MAPPING):
            raise NotInjectable(f"{path}.{key}[{index}]".lstrip("."), "must be a mapping")
    return value


def growing(mapping: Fields, key: str, path: str, **where: Sequence[str]) -> MutableSequence[Any]:
    """Return the list under a key, to be added to; an empty one is made anew, so that ``[]`` does not stay in one line."""
    if not entries(mapping, key, path):
        if key in mapping:
            mapping[key] = []
        put(mapping, key, [], **where)
    value: MutableSequence[Any] = mapping[key]
    return value


def is_true(value: Any) -> bool:
    """Whether a boolean field is true, also as YAML 1.1 spells it, which Kubernetes' parser knows: ``yes`` and ``on``."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "y", "on"))


def metadata_of(owner: Mapping[str, Any]) -> Fields:
    """Return the metadata of a document or a pod template; an empty mapping where it has none."""
    return owner.get("metadata") or {}


def labels_of(owner: Mapping[str, Any]) -> Fields:
    """Return its labels; an empty mapping where it has none."""
    return metadata_of(owner).get("labels") or {}


def annotations_of(owner: Mapping[str, Any]) -> Fields:
    """Return its annotations; an empty mapping where it has none."""
    return metadata_of(owner).get("annotations") or {}


def containers_of(spec: Mapping[str, Any], path: str) -> Iterator[tuple[str, Fields]]:
    """Yield the containers of a pod, init containers first, each with its path.

    Raises:
        NotInjectable: They are no lists of mappings.
    """
    for key in ("initContainers", "containers"):
        for index, container in enumerate(entries(spec, key, path)):
            yield f"{path}.{key}[{index}]", container


def named(items: Sequence[Fields], name: str, *, key: str = "name") -> Fields | None:
    """Return the entry whose ``name`` (or other key) is this."""
    return next((entry for entry in items if entry.get(key) == name), None)


def put_named(items: MutableSequence[Any], wanted: Mapping[str, Any], *, key: str = "name") -> None:
    """Add an entry, or make the one with the same name equal to it."""
    there = named(items, wanted[key], key=key)
    if there is None:
        items.append(dict(wanted))
        return
    for gone in [field for field in there if field not in wanted]:
        del there[gone]
    for field, value in wanted.items():
        put(there, field, value)


def overlay(there: Fields, wanted: Mapping[str, Any]) -> None:
    """Make every field of ``wanted`` so, whatever else is there; lists are replaced as a whole."""
    for field, value in wanted.items():
        if isinstance(value, (dict, Mapping)) and isinstance(there.get(field), _MAPPING):
            overlay(there[field], value)
        else:
            put(there, field, value)
