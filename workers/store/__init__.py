"""A node's KV store: copies of filled pages in memory that its ranks share."""
