"""Attention over pages, each form beside the reference that defines it."""
