"""One package or module per kernel family: public functions, specs, reference and test cases."""
