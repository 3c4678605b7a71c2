"""The environment, a variable a line (without a name: of mountinfo): settings, or one line that says what is wrong."""

from __future__ import annotations

from sidecar.daemon.settings import Settings, from_environment
from sidecar.errors import ConfigurationError
from tests.fuzz.target import check_text

INSTRUMENTED = ("sidecar.daemon.settings", "sidecar.amounts", "trainer_hook.contract")
WORDS = (
    *(
        b"CKPT_GRACE_SECONDS=",
        b"CKPT_MIN_FREE=",
        b"CKPT_BANDWIDTH_LIMIT=",
        b"CKPT_PART_SIZE=",
        b"CKPT_METRICS_BIND=",
        b"CKPT_SSE=",
    ),
    *(
        b"CKPT_STATE_DIR=",
        b"CKPT_CREDENTIALS_DIR=",
        b"CKPT_CA_BUNDLE=",
        b"CKPT_NODE_INDEX=",
        b"CKPT_NODE_COUNT=",
        b"PET_NNODES=",
    ),
    *(b"PET_NODE_RANK=", b"JOB_COMPLETION_INDEX=", b"JOBSET_UID=", b"JOBSET_RESTART_ATTEMPT=", b"POD_UID=", b"JOB_NAME="),
    *(
        b"CKPT_KEEP_STORE=",
        b"CKPT_CONCURRENCY=",
        b"CKPT_API_PORT=",
        b"CKPT_SPOT=aws",
        b"CKPT_SPOT_ENDPOINT=",
        b"CKPT_VERIFY_TLS=",
    ),
    *(
        b"nan",
        b"inf",
        b"1e999",
        b"GB",
        b"MiB/s",
        b"-1",
        b"0x10",
        b"1_000",
        b"\xd9\xa3",
        b"\xff",
        b"[::1]:9471",
        b"null",
        b"true",
    ),
)


def check(raw: bytes) -> None:
    lines = [line.partition("=") for line in raw.replace(b"\0", b"").decode("utf-8", errors="surrogateescape").split("\n")]
    environ = {name: value for name, equals, value in lines if equals and name}
    rest = "\n".join(value for name, equals, value in lines if equals and not name)
    try:
        settings = from_environment(environ, mountinfo=rest, hostname=rest[:64])
    except ConfigurationError as error:
        check_text(error)
        return
    assert isinstance(settings, Settings)
    assert settings.store
    assert settings.pod
