"""Eagle Eye: watches every rank of a training job and says which node is bad, and why."""

__version__ = "0.1.0"
