"""Puts the sidecar into Kubernetes manifests: documents in, documents and warnings out. Only ``command`` touches files.

- ``manifests`` → ``documents`` → ``injection``: a file, a document, a pod template. ``merging``, ``kyaml`` keep the style.
- Found in a document: ``pod_templates`` (by kind), ``roles`` and ``trainer`` (who trains), ``workload`` (the run's name),
  ``identity`` (number and index of nodes), ``recalled`` (options of an earlier injection).
- Written into a pod: ``containers``, ``resources``, ``environment``, ``volumes``; into its Job or JobSet: ``preemption``; into
  a TrainJob: ``train_job``.
- Refusals and warnings: ``reports``; judged in ``warnings``, ``preemption``, and for shells in ``exit_codes`` and ``shell``.
"""

from sidecar.kubernetes.inject.documents import Injected, inject
from sidecar.kubernetes.inject.manifests import inject_text
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.reports import InjectWarning, NotInjectable

__all__ = ["InjectWarning", "Injected", "NotInjectable", "Options", "inject", "inject_text"]
