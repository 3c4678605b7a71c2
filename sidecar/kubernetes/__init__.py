"""Kubernetes manifests and admission: independent of the running sidecar."""
