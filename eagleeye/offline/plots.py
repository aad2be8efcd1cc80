"""Figures without a screen: matplotlib's state machine and its choice of a backend stay out of it."""

from typing import Any


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of that size in inches, drawn by Agg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made
