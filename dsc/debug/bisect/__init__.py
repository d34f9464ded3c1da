"""Which pass changed my numbers: the first pass whose output differs, the rewrite within it, and the node."""

from __future__ import annotations

from dsc.debug.bisect.found import Case, Checked, Finding, Verdict
from dsc.debug.bisect.search import bisect, examine

__all__ = ["Case", "Checked", "Finding", "Verdict", "bisect", "examine"]
