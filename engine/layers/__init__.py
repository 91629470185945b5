"""The pieces that decoders are made of."""
