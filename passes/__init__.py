"""Imported as ``dsc.passes``; the folder lies at the top level of the repository."""

if __name__ != "dsc.passes":
    raise ImportError("import dsc.passes, not passes")
