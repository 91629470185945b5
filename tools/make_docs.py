#!/usr/bin/env python3
"""Write the parts of docs/ that are made from the code: flags, toggles, metrics, routes.

    python tools/make_docs.py            # write them
    python tools/make_docs.py --check    # exit with 1 and name the pages that are not up to date

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; what is around it is
written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from doc_tables import flags, metrics, routes, toggles, vllm  # noqa: E402

PARTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "routes": routes.routes,
        "shared-metrics": metrics.shared_metrics,
        "own-metrics": metrics.own_metrics,
        "toggles": toggles.toggles,
        "family-toggles": toggles.family_toggles,
        "serve-flags": flags.serve_flags,
        "verb-flags": flags.verb_flags,
        "other-names": flags.other_names,
        "neutral-flags": vllm.neutral_flags,
        "absent-flags": vllm.absent_flags,
    }
)
_PART = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def renewed(text: str) -> str:
    """Return a page with its parts made anew. Raises KeyError if a part's name is unknown."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def pages() -> list[Path]:
    """Return the pages that may have such parts."""
    return sorted((ROOT / "docs").glob("*.md"))


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    old = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = renewed(text)
        if new != text:
            old.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.check and old:
        print(f"not up to date: {', '.join(old)}; run python tools/make_docs.py", file=sys.stderr)
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
