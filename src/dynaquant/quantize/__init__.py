"""Quantizers: values to levels and a codebook."""
