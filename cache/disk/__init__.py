"""The files of the cache: where they lie, who may own them, how they are written and removed."""
