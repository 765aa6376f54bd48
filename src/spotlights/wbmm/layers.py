"""WBMM as modules: the operator, its folded form, and hierarchical windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spotlights.wbmm.backends import BACKENDS
from spotlights.wbmm.folding import ANY_MAP, ONE_WINDOW, Foldable, Kinded, add_centred, affine_of, parameter_like, wide
from spotlights.wbmm.functional import PreparedCache, apply

if TYPE_CHECKING:
    from typing_extensions import Self


def sides_of(window_size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """Return (height, width) of a window given as one side or as both; ValueError names it otherwise.

    Example:
        >>> sides_of(7, "window_size")
        (7, 7)
    """
    sides = window_size if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name}: got {window_size!r}, expected a positive int or two of them")
    return sides[0], sides[1]


class WBMM2d(Kinded):
    """Windowed batch matrix multiplication over maps (B, C, H, W), drop-in for a large depthwise convolution.

    See :func:`spotlights.wbmm.wbmm2d` for the mathematics (arXiv 2607.02097, section 3). In eval mode, what a backend
    derives from the weight is kept until the weight changes; a write through ``weight.data`` goes unseen, so use
    ``with torch.no_grad(): weight.copy_(...)`` instead.

    Args:
        channels: C, the channels of input and output.
        window_size: one side or (height, width); every output sees its whole window.
        shortcut: add the input to the output, as the paper's networks do.
        bias: learn a bias per channel.
        backend: a name from ``spotlights.wbmm.backends``, or None for the first that can run.
        device: where to create the parameters.
        dtype: dtype of the parameters.

    Shape:
        input and output (B, C, H, W), any height and width.

    Raises:
        ValueError: channels or window_size is not positive, or backend is unknown.

    Example:
        >>> layer = WBMM2d(64, window_size=7)
        >>> layer(torch.randn(1, 64, 50, 37)).shape
        torch.Size([1, 64, 50, 37])
    """

    def __init__(
        self,
        channels: int,
        window_size: int | tuple[int, int] = 7,
        *,
        shortcut: bool = True,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sides = sides_of(window_size, "WBMM2d: window_size")
        if channels < 1:
            raise ValueError(f"WBMM2d: channels: got {channels}, expected at least 1")
        if backend is not None:
            BACKENDS[backend]
        self.channels = channels
        self.window_size = sides
        self.shortcut = shortcut
        self.backend = backend
        table = (channels, 2 * sides[0] - 1, 2 * sides[1] - 1)
        self.weight = nn.Parameter(torch.empty(table, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self._prepared = PreparedCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution of deviation 0.02, truncated at 2, and zero the bias."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def state_kind(self) -> str:
        return "operator"

    def train(self, mode: bool = True) -> Self:
        self._prepared.clear()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Converting there and back can reuse an address: the weight differs while nothing in the cache's key does.
        self._prepared.clear()
        return super()._apply(fn, recurse)

    def forward(self, input: Tensor) -> Tensor:
        cache = None if self.training else self._prepared
        return apply(input, self.weight, self.bias, self.shortcut, None, self.backend, cache)

    def extra_repr(self) -> str:
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return (
            f"{self.channels}, window_size={self.window_size}, shortcut={self.shortcut}, "
            f"bias={self.bias is not None}{backend}"
        )


class FoldedWBMM2d(WBMM2d):
    """What folding makes of an operator and the norms behind it: the shortcut lies in the table, a bias is there.

    Its state dict carries a marker, ``folded`` or ``folded_single_window``, and loads into its own kind only.

    Args:
        channels: C, the channels of input and output.
        window_size: one side or (height, width).
        local_window_size: of the sub-windows, which divides window_size, for a second table that acts inside them
            (``local_weight``, see :func:`spotlights.wbmm.wbmm2d`).
        single_window: the table holds convolutions too, which is right on maps of one window only: larger ones are
            refused.
        backend: how to compute it, as for :class:`WBMM2d`.
        device: where to create the parameters.
        dtype: dtype of the parameters.

    Shape:
        input and output (B, C, H, W), any height and width.

    Raises:
        ValueError: a window does not fit; or, called, a map larger than a single window.

    Example:
        >>> layer = FoldedWBMM2d(8, 14, local_window_size=7)
        >>> {name: tuple(value.shape) for name, value in layer.state_dict().items()}
        {'weight': (8, 27, 27), 'bias': (8,), 'local_weight': (8, 13, 13), 'folded': ()}
    """

    def __init__(
        self,
        channels: int,
        window_size: int | tuple[int, int] = 7,
        local_window_size: int | tuple[int, int] | None = None,
        *,
        single_window: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, window_size, shortcut=False, bias=True, backend=backend, device=device, dtype=dtype)
        self.bias: nn.Parameter
        self.single_window = single_window
        self.local_window_size: tuple[int, int] | None = None
        self.local_weight: nn.Parameter | None = None
        if local_window_size is not None:
            self.local_window_size = local = _local_sides(local_window_size, self.window_size, "FoldedWBMM2d")
            table = (channels, 2 * local[0] - 1, 2 * local[1] - 1)
            self.local_weight = nn.Parameter(torch.empty(table, device=device, dtype=dtype))
            nn.init.trunc_normal_(self.local_weight, std=0.02)
        # Its name counts, not its value, which averaging of weights may spoil.
        marker = ONE_WINDOW if single_window else ANY_MAP
        self.register_buffer(marker, torch.ones((), dtype=torch.uint8, device=device))

    @classmethod
    @torch.no_grad()
    def of(
        cls, op: WBMM2d, local_window_size: tuple[int, int] | None = None, *, single_window: bool = False
    ) -> FoldedWBMM2d:
        """Return an operator with its shortcut in the table, ready for more to be folded in.

        Raises:
            ValueError: op is a folded one of two tables or for one window, of which this would lose a part.
        """
        if isinstance(op, FoldedWBMM2d) and (op.single_window or op.local_weight is not None):
            raise ValueError(f"FoldedWBMM2d: op: got {op}, expected an operator of one table for maps of any size")
        like = op.weight
        # On "meta" nothing is drawn: folding leaves the random numbers of a training run as they are.
        folded = cls(
            op.channels,
            op.window_size,
            local_window_size,
            single_window=single_window,
            backend=op.backend,
            device="meta",
            dtype=like.dtype,
        )
        for name, marker in folded.named_buffers():
            folded.register_buffer(name, torch.ones_like(marker, device=like.device))
        if folded.local_weight is not None:
            folded.local_weight = parameter_like(torch.zeros(folded.local_weight.shape), like)
        table = wide(like)
        if op.shortcut:
            add_centred(table, table.new_ones(op.channels, 1, 1))
        folded.weight = parameter_like(table, like)
        folded.bias = parameter_like(table.new_zeros(op.channels) if op.bias is None else wide(op.bias), like)
        return folded.train(op.training)

    @torch.no_grad()
    def absorb(self, scale: Tensor, shift: Tensor) -> FoldedWBMM2d:
        """Make the output, in place, ``scale * output + shift``, both (C,)."""
        self.weight = parameter_like(wide(self.weight) * scale.view(-1, 1, 1), self.weight)
        if self.local_weight is not None:
            self.local_weight = parameter_like(wide(self.local_weight) * scale.view(-1, 1, 1), self.local_weight)
        self.bias = parameter_like(wide(self.bias) * scale + shift, self.bias)
        return self

    @property
    def state_kind(self) -> str:
        if self.single_window:
            return "single window"
        return "folded operator" if self.local_weight is None else "two tables"

    def forward(self, input: Tensor) -> Tensor:
        if self.single_window and (input.shape[-2] > self.window_size[0] or input.shape[-1] > self.window_size[1]):
            raise ValueError(
                f"FoldedWBMM2d: input: got a map of {tuple(input.shape[-2:])}, expected at most {self.window_size}: it "
                "was folded for images whose last map is one window; for others fold without input_size"
            )
        cache = None if self.training else self._prepared
        return apply(input, self.weight, self.bias, False, self.local_weight, self.backend, cache)

    def extra_repr(self) -> str:
        local = "" if self.local_window_size is None else f", local_window_size={self.local_window_size}"
        single = ", single_window=True" if self.single_window else ""
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return f"{self.channels}, window_size={self.window_size}{local}{single}{backend}"


class HierarchicalWBMM2d(Kinded, Foldable):
    """Hierarchical windows: BN_g(WBMM_g(x) + x) + BN_l(WBMM_l(x)) over maps (B, C, H, W), one operator once folded.

    Small windows divide the large ones (arXiv 2607.02097, section 4). Both start at the top-left corner, and each norm
    sees the cropped map, so folding is exact on every size: :meth:`fuse` and :func:`spotlights.wbmm.reparameterize`
    give a :class:`FoldedWBMM2d` with two tables, ``(2g-1)² + (2l-1)²`` numbers a channel.

    Args:
        channels: C, the channels of input and output.
        window_sizes: of the global and the local operator, each one side or (height, width).
        shortcut: add the input to the global operator's output.
        backend: how to compute it, as for :class:`WBMM2d`.
        device: where to create the parameters.
        dtype: dtype of the parameters.

    Shape:
        input and output (B, C, H, W), any height and width.

    Raises:
        ValueError: a window is not positive, or the local one does not divide the global one.

    Example:
        >>> layer = HierarchicalWBMM2d(8, (14, 7)).eval()
        >>> x = torch.randn(1, 8, 30, 45)
        >>> torch.allclose(layer.fuse()(x), layer(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        channels: int,
        window_sizes: tuple[int | tuple[int, int], int | tuple[int, int]] = (14, 7),
        *,
        shortcut: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(window_sizes, (tuple, list)) or len(window_sizes) != 2:
            raise ValueError(f"HierarchicalWBMM2d: window_sizes: got {window_sizes!r}, expected (global, local)")
        window = sides_of(window_sizes[0], "HierarchicalWBMM2d: window_sizes")
        local = _local_sides(window_sizes[1], window, "HierarchicalWBMM2d")
        self.global_op = WBMM2d(channels, window, shortcut=shortcut, backend=backend, device=device, dtype=dtype)
        self.global_norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)
        self.local_op = WBMM2d(channels, local, shortcut=False, backend=backend, device=device, dtype=dtype)
        self.local_norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)

    @property
    def state_kind(self) -> str:
        return "hierarchical"

    def forward(self, input: Tensor) -> Tensor:
        return self.global_norm(self.global_op(input)) + self.local_norm(self.local_op(input))

    @torch.no_grad()
    def fuse(self, input_size: tuple[int, int] | None = None) -> FoldedWBMM2d:
        """Return both branches and their norms as one operator; it equals this module in eval mode.

        Args:
            input_size: changes nothing here.
        """
        folded = FoldedWBMM2d.of(self.global_op, self.local_op.window_size).absorb(*affine_of(self.global_norm))
        scale, shift = affine_of(self.local_norm)
        weight = self.local_op.weight
        folded.local_weight = parameter_like(wide(weight) * scale.view(-1, 1, 1), weight)
        folded.bias = parameter_like(wide(folded.bias) + shift, folded.bias)
        return folded


def _local_sides(window_size: int | tuple[int, int], window: tuple[int, int], owner: str) -> tuple[int, int]:
    sides = sides_of(window_size, f"{owner}: local window")
    if window[0] % sides[0] or window[1] % sides[1]:
        raise ValueError(f"{owner}: local window: got {sides}, expected one that divides the window {window}")
    return sides
