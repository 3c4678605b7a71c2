"""Coverage-guided fuzzing of everything that parses what others wrote (atheris, which is libFuzzer for Python).

A target is a module of ``targets`` with ``check(raw)``, which raises if a property does not hold for these bytes. Properties:
any bytes give a value or the one documented error, whose text is short and has no control characters; a value encodes to
bytes that give the value again. ``corpus/TARGET`` holds the seeds, and the inputs that broke a property once; ordinary pytest
checks all of them (``test_corpus``) without atheris.
"""
