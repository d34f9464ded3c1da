"""Imported as ``dsc.codegen``; the folder lies at the top level of the repository."""

if __name__ != "dsc.codegen":
    raise ImportError("import dsc.codegen, not codegen")
