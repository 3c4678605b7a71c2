"""The stores of the process tests."""

from __future__ import annotations

from tests.process.conftest import minio_server, moto_server, place, rgw_server

__all__ = ["minio_server", "moto_server", "place", "rgw_server"]
