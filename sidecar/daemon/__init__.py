"""The sidecar process: starts the services, changes the phase, and ends with a report."""
