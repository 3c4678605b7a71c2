"""Deterministic simulation of the nodes of a job that share nothing but a store (FORMAT.md, invariants I1 to I7).

The sidecar's own ``UploadJob``, ``Committer``, ``PostCommitCheck`` and ``Catalog`` run on a simulated clock, against a store in
memory behind a network that delays, loses and repeats requests, and answers errors after it did what it was asked. What is
modelled (``pods.py``) is what they are given: files, journals, threads, and the loop that begins a job. One seed gives one
schedule, always the same:

    python -m tests.simulation 4711          prints what happened, request by request
    python -m tests.simulation 0:100000      looks for seeds that break an invariant
"""
