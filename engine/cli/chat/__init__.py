"""``kiln chat``: the conversation, what answers, and what reads and shows it in a terminal."""
