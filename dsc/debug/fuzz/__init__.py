"""Random programs through the compiler, eager and float64: ``python -m dsc.debug.fuzz --seconds 60``.

A program is text, a line an operator (``program``, ``lines``, ``maker``).  Batches of independent ones are compiled as
one graph (``trial``) and compared with eager in everything that a call shows (``observe``), under written rules of
rounding (``rules``, ``noise``).  One that fails is cut down line by line (``shrinking``) and printed as a script.
"""

from __future__ import annotations

from dsc.debug.fuzz.maker import generate
from dsc.debug.fuzz.program import Input, Line, Program, script
from dsc.debug.fuzz.shrinking import shrink
from dsc.debug.fuzz.trial import check, check_all

__all__ = ["Input", "Line", "Program", "check", "check_all", "generate", "script", "shrink"]
