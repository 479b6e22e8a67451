"""``python -m dynaquant``: the command line, where its script is not on the path."""

from dynaquant.cli import main

main()
