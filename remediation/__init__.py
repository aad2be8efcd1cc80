"""Hands: implementations of the backend seam of `eagleeye.actions`."""
