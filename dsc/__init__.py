"""dsc: a training compiler for PyTorch.

``torch.compile(model, backend="dsc", options={...})`` needs no import of this package.
"""

__version__ = "0.1.0"
