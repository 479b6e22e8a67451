"""A run as one page to look at: its numbers, the charts of them, the page."""
