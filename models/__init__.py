"""Imported as ``dsc.models``; the folder lies at the top level of the repository."""

if __name__ != "dsc.models":
    raise ImportError("import dsc.models, not models")
