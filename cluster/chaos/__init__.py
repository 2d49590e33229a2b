"""``holdfast chaos``: faults under a load that verifies every token."""
