"""Watching the training loop: when to meta-step, the two front doors, and checkpoints."""
