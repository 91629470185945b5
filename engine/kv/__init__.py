"""The KV pool: blocks of keys and values, and who holds them."""
