"""The edges of a rank: gRPC servers and links, KV transfer, the Ray actor."""
