"""Programs that decide whether dsc gives eager's answers: ``python -m conformance``, or ``make conformance``."""
