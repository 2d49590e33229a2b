"""Shared by all parts of Holdfast: the wire format (``holdfast.v1``) and the errors."""
