"""List prices of storage."""

S3_STANDARD = 0.023
"""USD per GB and month, the list price of Amazon's S3 Standard."""
