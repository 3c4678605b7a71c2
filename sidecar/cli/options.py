"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sidecar.core.format import keys
from sidecar.core.format.checkpoint_address import Address, misnamed, parse_address
from sidecar.core.format.durations import duration_s
from sidecar.errors import ConfigurationError, NothingFound
from sidecar.store_url import FolderPlace, store_place
from trainer_hook.contract import ContractError


def _seconds(given: str | float) -> float:
    return given if isinstance(given, float) else duration_s(given)


def _timeout(shown: str) -> Any:
    """Return the option. ``shown``: its default as a person writes it."""
    text = f"how long to wait, such as 90s or 2m (default: {shown})"
    return typer.Option("--timeout", metavar="DURATION", parser=_seconds, show_default=False, help=text)


Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON; an error, too")]
TimeoutS = Annotated[float, _timeout("10m")]
FlushTimeoutS = Annotated[float, _timeout("30s")]
WaitS = Annotated[
    float | None,
    typer.Option("--wait", metavar="DURATION", parser=_seconds, help="wait for that, at most this long, such as 60s"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
WhileLive = Annotated[bool, typer.Option("--while-live", help="also while a run uses the prefix")]
StoreAddress = Annotated[str, typer.Argument(metavar="STORE", help="s3://bucket/prefix or file:///path")]
CheckpointAddress = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="such as s3://bucket/prefix/checkpoint-40")]
CheckpointOrNewest = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="such as s3://bucket/prefix/checkpoint-40; of a prefix alone, the newest")
]


def store_address(text: str) -> Address:
    """Return the parts of an address.

    Raises:
        ConfigurationError: It is no address of a store.
    """
    try:
        return parse_address(text)
    except ContractError as error:
        raise ConfigurationError(str(error)) from None


def address_to_read(text: str) -> Address:
    """Return the parts of an address that is read.

    Raises:
        ConfigurationError: It is no address of a store.
        NothingFound: It has a misspelled checkpoint's name below a run in a folder.
    """
    address = store_address(text)
    if address.checkpoint is None and _is_missing_below_run(address.store):
        raise NothingFound(f"{text}: no such checkpoint{misnamed(text)}")
    return address


def _is_missing_below_run(store: str) -> bool:
    """Whether a folder is missing in one that is a run's store, or has pushed checkpoints. So its volume is mounted."""
    try:
        place = store_place(store)
        if not isinstance(place, FolderPlace) or place.path.exists():
            return False
        above = place.path.parent
        return (above / keys.RUN).is_file() or any(above.glob(keys.commit("*")))
    except (OSError, ValueError):  # opening the store says what is wrong
        return False


def checkpoint_address(text: str) -> tuple[str, str]:
    """Return the prefix and the name of a checkpoint.

    Raises:
        ConfigurationError: The address names no checkpoint.
    """
    address = store_address(text)
    if address.checkpoint is None:
        hint = misnamed(text) or f": add its name, such as {text.rstrip('/')}/checkpoint-40"
        raise ConfigurationError(f"{text} names no checkpoint{hint}")
    return address.store, address.checkpoint
