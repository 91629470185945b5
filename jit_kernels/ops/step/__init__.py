"""The inputs of a step, made on the device from one message."""
