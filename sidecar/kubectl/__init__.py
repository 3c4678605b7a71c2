"""The plugin ``kubectl ckpt``: one job across its pods, by kubectl alone. Nothing of the sidecar is asked but its commands."""
