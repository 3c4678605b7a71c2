"""The commands of ``checkpoint-sidecar``: arguments, calls to the local API, output; a module per group of commands."""
