"""Shared by offline (fit) and online (score): what a normal rank looks like, and how far one is from it."""
