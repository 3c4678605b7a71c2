"""Attacks on a sidecar by those whom it does not trust: the bucket, the trainer that shares its volume, and a full disk.

Real sidecar processes on real volumes and stores. What attacks single classes is tested beside them
(``tests/volume/test_hostile``, ``tests/store/s3/test_answers``), and what the network does in ``tests/faults``.
"""
