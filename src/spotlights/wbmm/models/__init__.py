"""The WBMM networks. Importing this module registers their names with timm, here and in whatever builds on timm.

Example:
    >>> import timm
    >>> import spotlights.wbmm.models
    >>> network = timm.create_model("wbmm_atto", in_chans=1, num_classes=10)
"""

from .checkpoints import checkpoint_filter_fn, load_original_checkpoint
from .network import WBMMNet
from .zoo import (
    wbmm_atto,
    wbmm_nano,
    wbmm_pico,
    wbmm_small,
    wbmm_small_dense,
    wbmm_small_hier,
    wbmm_tiny,
    wbmm_tiny_dense,
    wbmm_tiny_hier,
)

__all__ = [
    "WBMMNet",
    "checkpoint_filter_fn",
    "load_original_checkpoint",
    "wbmm_atto",
    "wbmm_nano",
    "wbmm_pico",
    "wbmm_small",
    "wbmm_small_dense",
    "wbmm_small_hier",
    "wbmm_tiny",
    "wbmm_tiny_dense",
    "wbmm_tiny_hier",
]
