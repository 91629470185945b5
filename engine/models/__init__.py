"""Read and check model folders in Hugging Face format, and build the models."""
