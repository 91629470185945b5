"""Show the kernels, their implementations and why each was chosen; maintain the kernel cache.

Exit codes: 0 success, 3 a kernel is not in a sealed cache, 4 corrupt entries, 5 a compile failed.
"""

HELP = "list, check, verify, ship the kernels; see which implementation runs and why"
SUBCOMMANDS = {"metavar": "VERB", "dest": "verb"}
