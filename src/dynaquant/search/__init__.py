"""Which configuration a checkpoint gets. See ``manager``."""
