"""Graphs as pictures and files: what a stage of a compilation looks like, laid out, and written as SVG, DOT, JSON or ONNX."""
