"""What both attention families share: references, cases, splits, tiles and workspaces."""
