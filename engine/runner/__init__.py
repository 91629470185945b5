"""From a Batch to its tokens: inputs, forward pass, sampling."""
