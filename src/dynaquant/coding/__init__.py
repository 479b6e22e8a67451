"""Coders: levels and exact values to bytes and back."""
