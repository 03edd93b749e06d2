"""A page about runs: what their folders contain, as curves, tables and events."""
