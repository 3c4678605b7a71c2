from __future__ import annotations

import re
from pathlib import Path

from sidecar.core.lifecycle import exit_codes

FORMAT = Path(__file__).parents[3] / "FORMAT.md"


def test_each_exit_code_is_documented() -> None:
    codes = sorted(value for name, value in vars(exit_codes).items() if name.startswith("EXIT_"))
    section = FORMAT.read_text().partition("### Exit codes\n")[2].partition("\n## ")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d) ", section, re.MULTILINE)}
    documented |= {int(code) for code in re.findall(r"\b(\d+) \(", section)}
    assert codes == [*range(len(codes) - 1), exit_codes.EXIT_INTERRUPTED]
    assert set(codes) == documented
