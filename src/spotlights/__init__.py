"""Methods of ICML 2026 as drop-in PyTorch.

Each method lives in a subpackage of its own, for example :mod:`spotlights.wbmm`.
"""

__version__ = "0.1.0"
