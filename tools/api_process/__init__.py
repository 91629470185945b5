"""What ``bench_api_process.py`` is made of: an engine that only emits, and readers of streams."""
