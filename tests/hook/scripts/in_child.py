"""Trains in a forked child; the main process has imported the library, too, and waits."""

import multiprocessing
import runpy
import sys
from pathlib import Path

from transformers import Trainer  # noqa: F401

script = str(Path(__file__).with_name("train.py"))
child = multiprocessing.get_context("fork").Process(target=runpy.run_path, args=(script,), kwargs={"run_name": "__main__"})
child.start()
child.join()
sys.exit(child.exitcode)
