"""Model folders in Hugging Face format, read, checked and built."""
