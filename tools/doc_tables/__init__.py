"""The parts of docs/ that are made from the code: each module makes one kind of table."""
