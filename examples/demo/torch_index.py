"""Print pip's option for PyTorch's CPU build, where this machine needs no other and its index answers; otherwise nothing.

Standard library only: it runs before anything is installed.
"""

import platform
import shutil
import sys
import urllib.error
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 5.0


def main() -> None:
    """Look, and print one option or nothing."""
    has_cuda_build = sys.platform == "linux" and platform.machine() == "x86_64"
    if not has_cuda_build or shutil.which("nvidia-smi"):
        return
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=TIMEOUT_S):  # noqa: S310 - a constant https address
            print("--extra-index-url", INDEX)
    except (OSError, urllib.error.URLError):
        return


if __name__ == "__main__":
    main()
