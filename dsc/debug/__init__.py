"""Watching a compilation from outside: deleting this folder leaves the compiler working."""
