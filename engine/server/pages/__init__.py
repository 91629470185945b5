"""The pages for a browser, and the files that they load."""
