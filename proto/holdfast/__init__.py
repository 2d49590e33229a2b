"""What every part of Holdfast shares: the wire format (``holdfast.v1``) and the errors."""
