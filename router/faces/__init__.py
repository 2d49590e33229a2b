"""The APIs that clients speak. Each turns requests into ``TurnRequest`` and chunks into its own answers."""
