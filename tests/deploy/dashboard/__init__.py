"""The Grafana dashboard's own queries, answered by a Prometheus that scrapes real sidecars: ``test_dashboard.py``."""
