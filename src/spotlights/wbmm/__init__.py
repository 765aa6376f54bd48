"""Windowed Batch Matrix Multiplication (arXiv 2607.02097, ICML 2026).

A spatial operator for vision networks: a large receptive field at the price of regular memory access. The networks are
in :mod:`spotlights.wbmm.models`, which needs the ``vision`` extra.
"""

from spotlights.wbmm.conversion import ConversionReport, ConvertedDepthwise2d, convert_depthwise
from spotlights.wbmm.functional import wbmm2d
from spotlights.wbmm.layers import FoldedWBMM2d, HierarchicalWBMM2d, WBMM2d
from spotlights.wbmm.reparam import reparameterize, resize_window

__all__ = [
    "ConversionReport",
    "ConvertedDepthwise2d",
    "FoldedWBMM2d",
    "HierarchicalWBMM2d",
    "WBMM2d",
    "convert_depthwise",
    "reparameterize",
    "resize_window",
    "wbmm2d",
]
