"""A turn's way through the router: admission, placement, journal, relay, failover, end."""
