"""Changes to Kubernetes manifests, from files and at admission. Imports nothing of the running sidecar."""
