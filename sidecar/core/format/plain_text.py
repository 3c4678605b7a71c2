"""Sanitising of untrusted text (``trainer_hook.contract.plain_text``)."""

from __future__ import annotations

from trainer_hook.contract.plain_text import MOST_CHARACTERS as MOST_CHARACTERS
from trainer_hook.contract.plain_text import plain_text as plain_text
