"""Puts the sidecar into Kubernetes manifests: documents in, documents and warnings out. Only ``command`` touches files.

Which pods a document has is in ``places``; which container trains, in ``trainer``; whose run it is, in ``workload``; what a pod
gets, in ``injection``, ``environment``, ``volumes`` and ``containers``; what stays from an earlier time, in ``recalled``; what
would bite, in ``traps``, ``preemption`` and ``exit_codes``; how the text keeps its comments and its order, in ``manifests``
and ``merging``.
"""

from sidecar.kubernetes.inject.documents import Injected, inject
from sidecar.kubernetes.inject.manifests import inject_text
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.pod_templates import InjectWarning, NotInjectable

__all__ = ["InjectWarning", "Injected", "NotInjectable", "Options", "inject", "inject_text"]
