"""Address of a store, a run or a checkpoint, as a person writes it: ``s3://bucket/runs/a/checkpoint-40``."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_hook.contract import ContractError, checkpoint_name, is_checkpoint_name

SCHEMES = ("s3://", "file://")


@dataclass(frozen=True, slots=True)
class Address:
    """A prefix, and a checkpoint below it. ``checkpoint`` ``None``: the address names none."""

    store: str
    checkpoint: str | None = None


def is_address(text: str) -> bool:
    """Whether a text names a store, rather than a checkpoint of the running sidecar."""
    return "://" in text


def parse_address(text: str) -> Address:
    """Return the parts of an address. Whether the store is valid is known when it is opened.

    Raises:
        ContractError: It is no address of a store.
    """
    if is_checkpoint_name(name := named_checkpoint(text)):
        raise ContractError(f"{text!r} is no store: name the store, too: $CKPT_STORE/{name}, or s3://bucket/prefix/{name}")
    if not text.startswith(SCHEMES):
        raise ContractError(f"{text!r} is no store: it must be s3://bucket/prefix or file:///path")
    above, _, last = text.rstrip("/").rpartition("/")
    if is_checkpoint_name(last) and not above.endswith("/"):
        return Address(above, last)
    return Address(text)


def misnamed(text: str) -> str:
    """Return what is wrong with the end of an address that names no checkpoint, to be added to a sentence; often nothing."""
    above, _, last = text.rstrip("/").rpartition("/")
    if (name := named_checkpoint(last)) != last:
        return f"; did you mean {above}/{name}?"
    if last.lower().startswith("checkpoint"):
        return f"; {last!r} is no checkpoint's name: checkpoint-<step>, or final"
    return ""


def named_checkpoint(text: str) -> str:
    """Return the name of a checkpoint that a person gave as its name, or as its step alone."""
    is_step = text.isascii() and text.isdigit() and len(text) <= 18
    return checkpoint_name(int(text)) if is_step else text
