"""Slipstream inside other libraries."""
