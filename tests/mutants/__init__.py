"""Mutation testing of ``sidecar/core``: one decision is changed at a time, and its tests must fail.

``survivors.txt`` lists the mutants that no test can kill, because they behave as the original does, each with the reason.
"""
