#!/usr/bin/env python3
"""Shows the progress of a build from its output, and its last lines if it fails.

Reads pip's output from standard input. Prints the lines in which ninja counts ("[3/40] Building ..."), and what CMake
found. If pip ends with an error, its last lines follow. With `pipefail` the pipe returns pip's exit status.
"""

import re
import sys

SHOWN = re.compile(r"^\s*(\[\d+/\d+\] (?:Building|Linking)|-- jaxsok:|.*\b(?:error|FAILED)\b)")
LAST_LINES = 60

lines = []
for line in sys.stdin:
    lines.append(line)
    if SHOWN.match(line):
        print(re.sub(r"(Building \w+ object ).*/", r"\1", line.strip()), flush=True)
if not any(line.startswith("Successfully installed") for line in lines):
    print("".join(lines[-LAST_LINES:]), end="", file=sys.stderr)
