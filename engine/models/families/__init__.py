"""One module per model family, each with a FAMILY: a new family is a new file here."""
