"""Checkpoint files and runs: writing, reading, atomic commits, locks, retention."""
