"""In-memory checkpoints: a server of memory on every node, and its client in the training process. Usable without the rest."""
