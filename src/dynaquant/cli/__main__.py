"""``python -m dynaquant.cli``."""

from dynaquant.cli import main

main()
