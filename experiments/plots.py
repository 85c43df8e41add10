"""The look of pictures: distinct colours and markers, and small files."""

import io
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from specjax.support import files

# Okabe and Ito's colours, distinct for colour-blind readers too; without the pale yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
MARKERS = "osD^vP*X"
ACCEPTED = COLOURS[0]
PLAIN: dict[str, Any] = {"color": "0.4", "linewidth": 1, "linestyle": ":"}
BEST_STATIC: dict[str, Any] = {"color": COLOURS[1], "linewidth": 1.4}
ORACLE: dict[str, Any] = {"color": COLOURS[2], "linewidth": 1.2, "linestyle": "--"}


def line(number: int) -> dict[str, Any]:
    """Return colour and marker of a curve; eight curves differ in both."""
    at = number % len(COLOURS)
    return {"color": COLOURS[at], "marker": MARKERS[at], "markersize": 3.5, "linewidth": 1.1}


def bare(axes: Axes) -> None:
    """Remove the frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)


def save(path: pathlib.Path, figure: Figure, dpi: int = 120) -> None:
    """Write a PNG of 64 colours, a third of the size of one with all colours."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    with files.replacing(path) as part, Image.open(drawn) as image:
        few = image.convert("RGB").quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(part, format="png", optimize=True)
