"""Draft trees: their state, and how they grow."""
