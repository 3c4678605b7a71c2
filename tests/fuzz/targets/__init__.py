"""What is fuzzed, one module a target: ``check``, ``INSTRUMENTED`` (modules whose branches guide the fuzzer) and
optionally ``IS_JSON`` (mutations also change the parsed document), ``WORDS`` (what mutations insert) and ``MOST_BYTES``.
"""
