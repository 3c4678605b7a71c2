"""Botocore's descriptions of services, without what S3 does not need: 11 MiB less memory, and faster listings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from botocore.loaders import JSONFileLoader, Loader

SERVICES = ("s3", "sts", "sso", "sso-oidc", "signin")
"""S3, and the services that credentials come from."""
LISTED_MEMBERS = frozenset({"Key", "LastModified", "ETag", "Size"})
"""Members of a listed object that ``control`` reads."""
_READERS: dict[str, Callable[[Path], bytes]] = {
    ".json": Path.read_bytes,
    ".json.gz": lambda path: gzip.decompress(path.read_bytes()),
}


class _ReducedFiles(JSONFileLoader):
    """Leaves out the text of documentation and the endpoints of other services while it parses; botocore reads neither."""

    def load_file(self, file_path: str) -> Any:
        """Return the content of ``file_path`` with ``.json`` or ``.json.gz`` appended; ``None``: there is no such file."""
        for ending, read in _READERS.items():
            path = Path(file_path + ending)
            if path.is_file():
                return json.loads(read(path), object_hook=_reduced)
        return None


def _reduced(parsed: dict[str, Any]) -> dict[str, Any]:
    # Empty, not absent: some are asked for. Members of a structure may have this name, too: their value is no text.
    if isinstance(parsed.get("documentation"), str):
        parsed["documentation"] = ""
    if "partition" in parsed and isinstance(parsed.get("services"), dict):
        parsed["services"] = {name: endpoints for name, endpoints in parsed["services"].items() if name in SERVICES}
    return parsed


class ReducedLoader(Loader):
    """A session's component ``data_loader`` that keeps what S3 needs.

    It has no folders of the user's own (``AWS_DATA_PATH``): those describe other services.
    """

    FILE_LOADER_CLASS = _ReducedFiles

    def __init__(self) -> None:
        super().__init__()
        # botocore looks in each listed object for each member of its model: a quarter of the parsing is for unused ones.
        members = self.load_service_model("s3", "service-2")["shapes"]["Object"]["members"]
        for name in members.keys() - LISTED_MEMBERS:
            del members[name]

    def list_available_services(self, type_name: str) -> list[str]:
        """Return the services whose data is loaded. botocore looks into the folders of all that there are."""
        return list(SERVICES)


@cache
def shared_loader() -> ReducedLoader:
    """Return the one of this process: a session that is made anew, with other credentials, parses nothing again."""
    return ReducedLoader()
