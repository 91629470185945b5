"""Benchmarks, each with one report: numbers, machine, versions, command and date.

Nothing here needs a server package, so that it runs on a GPU machine that has torch alone.
"""
