"""S3 and compatible servers: requests of the control plane, bodies, credentials, probe, errors."""

import os

_TRUST = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
_before = {name: os.environ.get(name) for name in _TRUST}
os.environ.update(_TRUST)
try:
    # aiohttp reads all certificate authorities when it is imported, a twentieth of a start's CPU time, for contexts that are
    # never used here: each connection has a context of its own (``client``).
    import aiohttp  # noqa: F401
finally:
    for _name, _value in _before.items():
        if _value is None:
            del os.environ[_name]
        else:
            os.environ[_name] = _value
