"""One package or module per kernel family: its public functions, its specs and its tests' cases."""
