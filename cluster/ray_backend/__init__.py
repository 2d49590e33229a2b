"""The supervisor's components on Ray: workers as groups of rank actors, routers as actors."""
