"""How a kernel of the IR is launched by Triton: plain data, chosen by rule, by a model of the target, or by measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tile sizes (powers of two) and launch options. A kernel has to be run with the schedule it was emitted for."""

    XB: int = 1
    """Points of the parallel axes in a tile."""
    RB: int = 1
    """Points of the reduce axes in a tile: all of them (the kernel is persistent) or it loops."""
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = False
    """Whether the compiler may contract a product and a sum, which the kernel rounds one after the other."""
    programs: int = 0
    """So many programs walk the rows and keep their sums (see ``triton_columns``), or the tiles of a product, one after the
    other (the kernel is persistent: as many as the GPU has multiprocessors); 0: one for each tile."""
    asserts: bool = False
    """Whether a failed check stops the GPU, as in PyTorch's own kernels, instead of setting a flag."""

    KB: int = 0
    """Points of the contraction that a product takes at once; 0: no product."""
    parts: int = 0
    """Pieces of the contraction, each a program's, which a second launch adds up (``triton_split``); 0: it is whole."""
    streams: int = 0
    """So many programs share the steps of all tiles of a product evenly, so that a tile is in at most ``parts`` pieces, which
    the second launch adds up (``triton_stream``); 0: its pieces are equal."""
    tma: bool = False
    """Whether a product loads its operands by descriptors (sm_90's tensor memory accelerator), where they allow it."""

    @property
    def label(self) -> str:
        """``2 x 1024, 4 warps``."""
        tile = " x ".join(str(n) for n in (self.XB, self.RB, self.KB) if n > 1) or "1"
        return (
            f"{tile}, {self.num_warps} warps"
            + (f", sums in {self.parts} parts" if self.parts and not self.streams else "")
            + (f", {self.streams} programs share the steps" if self.streams else "")
            + (", by descriptors" if self.tma else "")
            + (f", {self.programs} programs walk the tiles" if self.programs and self.KB else "")
        )
