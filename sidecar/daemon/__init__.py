"""The running process: starts the services, moves through the phases, and ends with a report."""
