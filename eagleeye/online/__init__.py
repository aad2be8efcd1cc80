"""The live line: read a window, score, vote, open and close incidents, serve them."""
