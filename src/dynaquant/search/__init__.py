"""Which configuration a checkpoint gets. So far: the quality of a given one."""
