"""Template text to verified bytes."""
