"""One module per kernel family: its specs and its public functions."""
