"""One module per format of tool calls, each with a FORMAT: a new format is a new file here."""
