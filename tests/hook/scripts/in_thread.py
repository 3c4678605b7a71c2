"""Trains in a thread, which also imports the library; the main thread waits."""

import runpy
import threading
from pathlib import Path

script = str(Path(__file__).with_name("train.py"))
thread = threading.Thread(target=runpy.run_path, args=(script,), kwargs={"run_name": "__main__"})
thread.start()
thread.join()
print("the main thread went on", flush=True)
