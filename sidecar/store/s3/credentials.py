"""Credentials: from a mounted secret, or from wherever botocore finds them, such as the service of a role."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from sidecar.store.s3.errors import NoAnswerOfCredentials, UnusableCredentials, UnusableSettings
from sidecar.store.s3.loop import LoopThread
from sidecar.store.s3.service_data import shared_loader

FETCHING: dict[str, Any] = {
    "connect_timeout": 2,
    "read_timeout": 2,
    "retries": {"total_max_attempts": 5, "mode": "standard"},
}
"""For botocore's STS client (web identity roles), which would wait for a minute by default. The metadata services of EC2 and of
containers have timeouts of their own, 1 and 2 s."""
HELD_S = 60.0
"""How long fetched credentials are used without asking whether newer ones are there, in seconds. botocore asks for each request
from 15 minutes before they expire on, and gives them up 10 minutes before."""
FETCHED_WITHIN_S = 60.0
"""Deadline for all of it, in seconds: a ``credential_process`` has none of its own."""
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_KNOWN_ERRORS = (
    boto.ClientError,
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    UnusableCredentials,
)
"""Errors that say themselves that they are about credentials."""


def read_secrets(folder: Path | None) -> tuple[str | None, ...]:
    """Return the keys of a mounted secret; ``None`` for each that it lacks, empty without a folder."""
    if folder is None:
        return ()
    # What is no text is no key of the store, which says so.
    files = [folder / name for name in _SECRETS]
    return tuple(file.read_text(errors="replace").strip() or None if file.is_file() else None for file in files)


def new_session(secrets: Sequence[str | None], *, ca_bundle: Path | None) -> AioSession:
    """Return a session for one set of credentials. ``ca_bundle``: authorities of the service of a role, too.

    Raises:
        PartialCredentialsError: The mounted secret has one of two keys.
    """
    session = AioSession()
    session.register_component("data_loader", shared_loader())
    session.set_default_client_config(AioConfig(**FETCHING))
    if ca_bundle is not None and not os.environ.get("AWS_CA_BUNDLE"):
        session.set_config_variable("ca_bundle", str(ca_bundle))
    # Times stay text: parsing them takes longer than all else about a listed object.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    if any(secrets):
        if not (secrets[0] and secrets[1]):
            raise boto.PartialCredentialsError(provider="CKPT_CREDENTIALS_DIR", cred_var=_SECRETS[bool(secrets[0])])
        session.set_credentials(*secrets)
    return session


async def fetch_credentials(session: AioSession) -> ReadOnlyCredentials:
    """Have a session find its credentials, and return the present ones. Its clients use the same.

    Raises:
        NoCredentialsError: There are none.
        BotoCoreError, ClientError, OSError: They cannot be fetched.
    """
    with _fetching():
        async with asyncio.timeout(FETCHED_WITHIN_S):
            found = await session.get_credentials()
    if found is None:
        raise boto.NoCredentialsError
    if not isinstance(found, Fetched):
        found = session._credentials = Fetched(found)
    return await found.get_frozen_credentials()


class Fetched:
    """Credentials of a session. Whatever happens while they are renewed is an error of credentials, not of the store."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self._known: ReadOnlyCredentials | None = None
        self._asked_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return them, renewed if they are about to expire. While that fails, they are used until shortly before.

        Raises:
            BotoCoreError, OSError: They cannot be renewed.
        """
        known = None if self._expires_within(HELD_S) else self._known
        if known is not None and time.monotonic() - self._asked_s < HELD_S:
            return known
        try:
            with _fetching():
                async with asyncio.timeout(FETCHED_WITHIN_S):
                    self._known = await self._found.get_frozen_credentials()
        except Exception:
            if known is None:
                raise
        self._asked_s = time.monotonic()
        assert self._known is not None
        return self._known

    def _expires_within(self, seconds: float) -> bool:
        refresh_needed = getattr(self._found, "refresh_needed", None)
        return refresh_needed is not None and bool(refresh_needed(seconds))


class Frozen:
    """Current credentials for threads. Only those that expire need the event loop."""

    def __init__(self, session: AioSession, loop: LoopThread) -> None:
        self._session = session
        self._loop = loop
        self._known: ReadOnlyCredentials | None = None

    def credentials(self) -> ReadOnlyCredentials:
        """Return the credentials, renewed if they are about to expire.

        Raises:
            NoCredentialsError: There are none.
            BotoCoreError, OSError: They cannot be renewed.
        """
        is_stale = getattr(self._session._credentials, "refresh_needed", bool)
        if self._known is None or is_stale():
            self._known = self._loop.run(fetch_credentials(self._session))
        return self._known


@contextmanager
def _fetching() -> Iterator[None]:
    """Name the errors of whatever gives credentials. botocore lets through what its parsers raise, such as ``KeyError``."""
    try:
        yield
    except _KNOWN_ERRORS:
        raise
    except TimeoutError as error:
        raise NoAnswerOfCredentials(error=TimeoutError(f"no answer within {FETCHED_WITHIN_S:g} s")) from error
    except (boto.HTTPClientError, boto.ConnectionError) as error:
        raise NoAnswerOfCredentials(error=error) from error
    except (boto.ProfileNotFound, boto.ConfigParseError, boto.NoRegionError) as error:
        raise UnusableSettings(error=error) from error
    except Exception as error:
        raise UnusableCredentials(error=error) from error
