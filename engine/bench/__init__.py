"""Benchmarks. Each writes one report: numbers, machine, versions, command and date.

Nothing here needs the server's packages, so it runs on a GPU machine that has only torch.
"""
