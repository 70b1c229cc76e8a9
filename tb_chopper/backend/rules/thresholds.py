"""From where on a rule speaks. One place for all rules: docs/diagnosis.md lists them with their reasons."""

from __future__ import annotations

LARGE_GAIN = 0.05
"""of a step: a diagnosis that would gain so much is a warning"""
SMALL_GAIN = 0.01
"""of a step: less is not worth a diagnosis"""
