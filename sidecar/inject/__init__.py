"""Puts the sidecar into Kubernetes manifests: documents in, documents and warnings out. Only ``command`` touches files.

Which pods a document has is in ``places``; what a pod gets, in ``pods`` and ``containers``; what would bite, in ``traps``; how
the text keeps its comments and its order, in ``manifests`` and ``merging``.
"""

from sidecar.inject.documents import Injected, inject
from sidecar.inject.manifests import inject_text
from sidecar.inject.options import Options
from sidecar.inject.places import NotInjectable, Warning_

__all__ = ["Injected", "NotInjectable", "Options", "Warning_", "inject", "inject_text"]
