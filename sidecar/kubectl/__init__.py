"""The plugin ``kubectl ckpt``: one job across its pods. It reaches sidecars by kubectl and their commands alone."""
