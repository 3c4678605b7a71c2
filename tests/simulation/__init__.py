"""Deterministic simulation of pods that share nothing but a store (FORMAT.md, invariants I1 to I7).

Three kinds of schedules. One seed gives one schedule, always the same:

- ``job``: whole pods. The production ``Daemon`` of each runs on a simulated event loop (``job/loop.py``). Its volume is a
  directory on tmpfs, its store one in memory behind a network (``job/network.py``) that delays, loses and repeats requests,
  and answers errors after it did what it was asked. Up to two attempts of up to three nodes save several steps and overlap;
  sidecars and pods are killed at any point. The store may lack conditional writes, and answer 404 for a while.
- ``step``: the nodes of a job that write and commit one step, dozens of times faster: ``UploadJob`` and ``Committer``.
- ``retention``: ``StoreRetention`` of several nodes, while the run goes back, and steps are damaged and quarantined.

What a resume finds is judged by a reader that shares no code with the sidecar (``job/reader.py``). ``mutants.py`` is the table
of rules that are broken on purpose, each of which a schedule must find.

    python -m tests.simulation job 4711                 what happened, request by request (--logs: with the sidecars' log)
    python -m tests.simulation step 0:100000            looks for seeds that break an invariant
    python -m tests.simulation job 0:200 --mutant NAME  the same with a broken rule
"""
